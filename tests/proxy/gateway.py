"""The process of one proxy with its engines, as a node that has that role is: ``python -m tests.proxy.gateway SPEC``.

It says that it is there, and how many places its engines serve, to the actor ``operator`` of its parent, where the
weight-sync actor lives, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from actors.core import Ref
from actors.core.hosting import ChildContext, ChildSpec, read_settings, run_child
from actors.core.restarts import Restarts
from actors.proxy.engines.protocol import EngineLimits
from actors.proxy.fleet import EngineFleet
from actors.proxy.messages import Acknowledged
from actors.proxy.proxy import LLMProxy


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What it is told."""

    kind: str
    policy_directory: str
    limits: EngineLimits
    engines: int = 2
    restarts: int = 1
    silence_s: float = 20.0
    tokens_every_s: float = 0.5


class Serving(msgspec.Struct, frozen=True):
    """To the operator: this proxy is there, and its engines that serve have so many places."""

    proxy: Ref
    places: dict[str, int]


async def work(context: ChildContext) -> Callable[[], Awaitable[None]]:
    settings, node = read_settings(context.spec, GatewaySettings), context.node
    operator = context.parent("operator")

    def serves(places: dict[str, int]) -> None:
        node.tell(operator, Serving(proxy.ref, places))

    specs = [_engine(context.spec, node.address, settings, index) for index in range(settings.engines)]
    commands = {spec.name: (spec, {"OMP_NUM_THREADS": "1"}) for spec in specs}
    proxy = LLMProxy(dict.fromkeys(commands, "CPU"), {}, failed=context.fail, serves=serves)
    restarts = Restarts(at_most=settings.restarts)
    proxy.fleet = EngineFleet(node, commands, proxy, silence_s=settings.silence_s, restarts=restarts)
    ref = await node.spawn(lambda: proxy, "proxy", restarts=0)
    await node.ask(operator, Serving(ref, {}), Acknowledged, timeout_s=10.0, retries=3)
    proxy.introduce(context.parent("weightsync"))
    await proxy.fleet.start()
    return _nothing


def _engine(mine: ChildSpec, parent: Any, settings: GatewaySettings, index: int) -> ChildSpec:
    told = {
        "kind": settings.kind,
        "policy_directory": settings.policy_directory,
        "dtype": "float32",
        "limits": msgspec.to_builtins(settings.limits),
        "seed": index,
        "tokens_every_s": settings.tokens_every_s,
        "load_every_s": 0.5,
    }
    return ChildSpec(f"{mine.name}.engine-{index}", mine.job, parent, mine.log_directory, told)


async def _nothing() -> None:
    """The node stops the proxy, and the proxy its engines."""


if __name__ == "__main__":
    run_child(work)
