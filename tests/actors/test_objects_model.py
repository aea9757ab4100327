"""The counting of references against a plain model: nodes put, hold, release, get, leave and crash at random."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.lending import TERM_S
from bus.objects import Object, ObjectGone
from bus.virtual_time import run
from tests.actors.machines import Host, crash

NAMES = ("a", "b", "c")
SIZES = (10, 100_000)
BOUND = 300_000  # bytes of memory: of the large objects three fit

DEEDS = [*["put", "hold", "get"] * 2, *["release"] * 3, "wait", "crash", "close"]

STEPS = st.lists(st.tuples(st.sampled_from(DEEDS), st.sampled_from(NAMES), st.integers(0, 7)), min_size=15, max_size=40)


@dataclass
class Model:
    """Who holds what. An object lives while somebody does who lives, on an owner that does."""

    owner: str
    value: int
    holds: Counter[str] = field(default_factory=Counter)
    over: bool = False

    @property
    def lives(self) -> bool:
        return not self.over and any(count > 0 for count in self.holds.values())


async def history(steps: list[tuple[str, str, int]]) -> None:
    host = Host()
    machines = {"a": "m1", "b": "m1", "c": "m2"}
    nodes = {name: host.node(name, machines[name], memory_bytes=BOUND) for name in NAMES}
    handles: list[Object[Any]] = []
    models: list[Model] = []
    for number, (what, drawn, which) in enumerate(steps):
        index = _index(models, which)
        holders = [holder for holder in NAMES if models and models[index].holds[holder]]
        name = holders[0] if what == "release" and which % 2 and holders else drawn
        node = nodes[name]
        if what == "put":
            handles.append(await node.put(np.full(SIZES[which % 2], number, np.uint8)))
            models.append(Model(name, number, Counter({name: 1})))
        elif what == "wait":
            await asyncio.sleep(TERM_S * 1.5)
        elif what in ("crash", "close"):
            if what == "crash":
                crash(node)
            await node.close()
            for model in models:
                model.over |= model.owner == name
                model.holds[name] = 0
                model.over |= not model.lives
            nodes[name] = host.node(name, machines[name], memory_bytes=BOUND)
            await asyncio.sleep(TERM_S + 1)  # what it held has expired by now, if nothing else tells of its end
        elif models:
            await _use(what, node, handles[index], models[index], name)
        await asyncio.sleep(0.1)
        for owner in NAMES:
            found = nodes[owner].description().objects
            expected = [model for model in models if model.owner == owner and model.lives]
            assert found["objects"] == len(expected), (number, what, name, owner)
            assert found["leases"] == sum(sum(model.holds.values()) for model in expected), (number, what, name, owner)
            assert found["memory_bytes"] <= BOUND
    for node in nodes.values():
        await node.close()


def _index(models: list[Model], which: int) -> int:
    """One of the newest three that live, or, now and then, of all."""
    living = [index for index, model in enumerate(models) if model.lives][-3:]
    return living[which % len(living)] if living and which != 7 else which % max(len(models), 1)


async def _use(what: str, node: Any, handle: Object[Any], model: Model, name: str) -> None:
    if what == "release":
        node.release(handle)
        model.holds[name] = max(model.holds[name] - 1, 0)
        model.over |= not model.lives
        return
    try:
        if what == "hold":
            await node.hold(handle, timeout_s=60)
        else:
            got = await node.get(handle, np.ndarray, timeout_s=60)
            assert int(got.min()) == int(got.max()) == model.value % 256
    except ObjectGone:
        assert not model.lives, (what, name)
    else:
        assert model.lives, (what, name)
        model.holds[name] += what == "hold"


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_an_object_lives_exactly_while_somebody_holds_it(steps: list[tuple[str, str, int]]) -> None:
    run(history(steps), seed=3)
