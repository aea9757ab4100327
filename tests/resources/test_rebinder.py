"""The proxy, two pools of engines and the rebinder: a task whose pool is full gets its next turns elsewhere."""

from __future__ import annotations

import asyncio

from coordinator.engines import Engines
from coordinator.resources.rebinder import Rebinder
from coordinator.resources.rebinding import Marks
from tests.proxy.support import LIMITS, world
from tests.support.loops import run, until

DECLARED = {"default": "H20", "games": "H800"}
QUICK = Marks(hold_s=0.1, rest_s=60.0)


def test_a_task_moves_to_the_calm_pool_and_its_next_requests_go_there() -> None:
    """Four places an engine: two tasks fill the H20, the H800 rests; the one with fewer requests moves. The other one's
    requests go there only as long as the H20 is full."""

    async def story() -> None:
        said: list[str] = []
        async with world({"e20": "H20", "e800": "H800"}, DECLARED) as made:
            for name in ("e20", "e800"):
                await made.serve(name)
            for number in range(LIMITS.max_sequences - 1):
                assert await made.add(f"m{number}", domain="math") == "e20"
            assert await made.add("w0", domain="web") == "e20"
            rebinder = Rebinder(
                made.node,
                Engines(made.node, lambda: [made.proxy.ref]),
                DECLARED,
                say=said.append,
                marks=QUICK,
                look_every_s=0.02,
            )
            running = asyncio.create_task(rebinder.run())
            await until(lambda: said)
            assert said == ["web goes to H800 instead of H20: H20 is full (load 1.00), H800 is calm (load 0.00)"]
            assert await made.add("w1", domain="web") == "e800"
            assert await made.add("m8", domain="math") == "e800"
            await until(lambda: "m0" in made.hosts["e20"].held)
            made.hosts["e20"].answer("m0")
            await until(lambda: "m0" not in made.proxy._where)
            assert await made.add("m9", domain="math") == "e20"
            counters = (await made.describe()).counters
            assert (counters["rebindings"], counters["affinity_fallbacks_full"]) == (1, 1)
            assert (await made.engine("e20")).by_domain == {"math": 3, "web": 1}
            running.cancel()

    run(story())


def test_where_all_engines_are_alike_nothing_moves_and_it_goes_on_looking() -> None:
    async def story() -> None:
        said: list[str] = []
        async with world({"a": "H20", "b": "H20"}, DECLARED) as made:
            for name in ("a", "b"):
                await made.serve(name)
            rebinder = Rebinder(
                made.node, Engines(made.node, lambda: [made.proxy.ref]), DECLARED, say=said.append, look_every_s=0.02
            )
            running = asyncio.create_task(rebinder.run())
            await asyncio.sleep(0.3)
            assert (running.done(), said) == (False, [])
            running.cancel()

    run(story())
