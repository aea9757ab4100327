"""A run's proxies, each in a process of its own with its engines, and whoever keeps them up: watches them, starts a
successor of one that is gone, tells everybody which there are, and brings weights to their engines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil

from actors.core import Actor, Node, Ref, handler
from actors.core.hosting import ChildSpec
from actors.core.process import Child, start_child
from actors.env.proxies import Proxies
from actors.proxy.messages import Acknowledged, DescribeProxy, ProxySet, ProxyState, ServingProxy
from actors.telemetry import Spans
from actors.weightsync.manifest import Manifest
from actors.weightsync.messages import Publish, Published
from actors.weightsync.publisher import Snapshot, WeightPublisher
from actors.weightsync.sync import WeightSync
from tests.engines.reference import Reference, prompt
from tests.proxy.gateway import GatewaySettings, Serving
from tests.support.loops import until

START_TIMEOUT_S = 180.0
FIRST_WORDS_S = 60.0
"""A process that was stopped before it said that it is there is silent from the start, and nobody watches it yet."""


class Operator(Actor):
    """See the module docstring."""

    def __init__(
        self, directory: Path, names: list[str], settings: GatewaySettings, sync: WeightSync, silence_s: float
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._sync = sync
        self._silence_s = silence_s
        self._order = itertools.count(1)
        self._members: dict[str, ServingProxy] = {}
        self._closing = False
        self._starting: dict[str, asyncio.TimerHandle] = {}
        self.names = names
        self.children: dict[str, Child] = {}
        self.proxies = Proxies(patience_s=START_TIMEOUT_S, late_s=START_TIMEOUT_S)
        self.deaths: Counter[str] = Counter()

    @handler
    async def serving(self, message: Serving) -> Acknowledged:
        name = message.proxy.node.name
        self._started(name)
        known = self._members.get(name)
        if known is None or known.ref != message.proxy:
            self.node.watch(
                message.proxy.node,
                silence_s=self._silence_s,
                on_lost=lambda why: self.children[name].kill(),
            )
        self._members[name] = ServingProxy(message.proxy, message.places)
        self._tell()
        return Acknowledged()

    def _tell(self) -> None:
        found = ProxySet(list(self._members.values()), (1, next(self._order)))
        self._sync.follow(found)
        self.proxies.follow(found)

    async def start(self, name: str) -> None:
        settings = msgspec.to_builtins(self._settings)
        spec = ChildSpec(name, "chaos", self.node.address, str(self._directory), settings)
        log = self._directory / f"{name}.out"
        text = msgspec.json.encode(spec).decode()
        child = self.children[name] = await start_child(name, "tests.proxy.gateway", [text], log_path=log)
        self._starting[name] = self.node.loop.call_later(FIRST_WORDS_S, child.kill)
        self.node.background(child.watch(lambda reason: self._died(name, reason)))

    def _started(self, name: str) -> None:
        timer = self._starting.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _died(self, name: str, reason: str) -> None:
        self._started(name)
        member = self._members.pop(name, None)
        self.deaths[name] += 1
        self.node.unwatch(name)
        if member is not None:
            self.node.lose(member.ref.node, reason)
        self._tell()
        if not self._closing:
            self.node.background(self.start(name))

    def give_up(self) -> None:
        """From now on who dies has no successor."""
        self._closing = True

    async def stop(self) -> None:
        self.give_up()
        for child in self.children.values():
            await child.stop()

    @property
    def serves(self) -> bool:
        """Whether every proxy has an engine that does."""
        return len(self._members) == len(self.names) and all(member.serves for member in self._members.values())

    def engines(self, name: str) -> dict[str, psutil.Process]:
        """The processes of a proxy's engines, by name."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.children[name].pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, msgspec.DecodeError, IndexError):
                    spec = msgspec.json.decode(process.cmdline()[-1], type=ChildSpec)
                    found[spec.name] = process
        return found

    async def describe(self) -> list[ProxyState]:
        refs = [member.ref for member in self._members.values()]
        return [await self.node.ask(ref, DescribeProxy(), ProxyState, timeout_s=10.0, retries=3) for ref in refs]


class Site:
    """What a test gets to see."""

    def __init__(self, node: Node, operator: Operator, publish: Publish, snapshot: Snapshot, sync: Ref) -> None:
        self.node = node
        self.operator = operator
        self._publish = publish
        self._snapshot = snapshot
        self._sync = sync
        self.publisher = WeightPublisher()
        self.version = -1

    async def next_version(self) -> Published:
        """The same weights under the next number."""
        self.version += 1
        manifest = msgspec.structs.replace(self._publish.manifest, version=self.version)
        self.publisher.publish(manifest, self._snapshot)
        order = msgspec.structs.replace(self._publish, manifest=manifest)
        return await self.node.ask(self._sync, order, Published, timeout_s=600.0)


@asynccontextmanager
async def site(
    directory: Path, names: list[str], settings: GatewaySettings, reference: Reference, silence_s: float = 20.0
) -> AsyncIterator[Site]:
    """Proxies of these names with engines that serve version 0 of the reference's weights; ``silence_s``: of one."""
    async with Node("control") as node:
        sync = WeightSync(Spans("weightsync"))
        sync_ref = await node.spawn(lambda: sync, "weightsync", restarts=0)
        operator = Operator(directory, names, settings, sync, silence_s)
        await node.spawn(lambda: operator, "operator", restarts=0)
        snapshot, canary = Snapshot(reference.weights(0)), prompt(24, 77)
        manifest = Manifest(0, "float32", snapshot.facts, canary, reference.score(0, canary))
        publisher = WeightPublisher()
        source = await node.spawn(lambda: publisher, "publisher", restarts=0)
        made = Site(node, operator, Publish(manifest, source), snapshot, sync_ref)
        made.publisher = publisher
        try:
            for name in names:
                await operator.start(name)
            await made.next_version()
            async with asyncio.timeout(START_TIMEOUT_S):
                await until(lambda: operator.serves)
            yield made
        finally:
            await operator.stop()
