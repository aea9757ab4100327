"""Which engine computes a prompt, and which one decodes: by class, version and load."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from actors.proxy.engines.load import EngineLoad
from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.messages import Accepted, Add, Served, Suspend
from actors.settings import SplitSettings
from tests.proxy.support import ScriptedHost, World, die, request, world
from tests.support.loops import run, until

SPLIT = SplitSettings(prefill=["H800"], min_tokens=10)
POOL = {"p0": "H800", "p1": "H800", "d0": "H20", "d1": "H20"}


def asks(name: str, tokens: int = 20, **changes: Any) -> GenerateRequest:
    prompt = np.zeros(tokens, np.int32)
    return msgspec.structs.replace(request(f"{name}/0", name), prompt=prompt, **changes)


async def given(made: World, asked: GenerateRequest) -> tuple[str, str | None]:
    """Which engine has a request, and which computes its prompt."""
    where = (await made.node.ask(made.proxy.ref, Add(asked, made.asker.ref), Accepted, timeout_s=5)).engine
    host = made.hosts[where]
    await until(lambda: asked.request_id in host.held)
    at = host.prefill_at[asked.request_id]
    return where, None if at is None else at.node.name


async def occupied(made: World, name: str, share: float) -> None:
    load = EngineLoad(figure="occupancy", load=share, occupancy=share, busy=share)
    made.node.tell(made.proxy.ref, Served(name, [], 0, load))
    await until(lambda: made.proxy._engines[name].measured == load)


async def all_serve(made: World, versions: dict[str, int] | None = None) -> dict[str, ScriptedHost]:
    return {name: await made.serve(name, (versions or {}).get(name, 0)) for name in POOL}


def test_long_prompts_are_computed_on_one_class_and_decoded_on_the_other() -> None:
    async def test() -> None:
        async with world(POOL, split=SPLIT) as made:
            await all_serve(made)
            for number in range(6):
                where, at = await given(made, asks(f"t{number}"))
                assert where in ("d0", "d1")
                assert at in ("p0", "p1")
            assert (await made.describe()).counters["prefills_elsewhere"] == 6
            where, at = await given(made, asks("short", 9))
            assert where in ("d0", "d1")
            assert at is None

    run(test())


def test_without_a_split_requests_are_whole() -> None:
    async def test() -> None:
        async with world(POOL) as made:
            await all_serve(made)
            assert {(await given(made, asks(f"t{number}")))[1] for number in range(6)} == {None}

    run(test())


def test_the_least_occupied_engine_computes_the_prompt_those_given_since_it_said_so_included() -> None:
    async def test() -> None:
        async with world(POOL, split=SPLIT) as made:
            await all_serve(made)
            await occupied(made, "p0", 0.75)
            await occupied(made, "p1", 0.25)
            found = [(await given(made, asks(f"t{number}")))[1] for number in range(4)]
            assert found == ["p1", "p1", "p0", "p1"], "a prompt is a quarter of an engine's four places"
            await occupied(made, "p1", 1.0)
            await occupied(made, "p0", 0.5)
            assert (await given(made, asks("later")))[1] == "p0"

    run(test())


def test_a_prompt_is_computed_under_the_version_that_decodes_it_or_whole() -> None:
    async def test() -> None:
        async with world(POOL, split=SPLIT) as made:
            await all_serve(made, {"p0": 1, "d0": 1, "p1": 2, "d1": 3})
            assert await given(made, asks("old", to_version=1)) == ("d0", "p0")
            assert await given(made, asks("new", from_version=3, to_version=3)) == ("d1", None)

    run(test())


def test_requests_go_whole_where_only_one_of_the_classes_serves() -> None:
    async def test() -> None:
        async with world(POOL, split=SPLIT) as made:
            await all_serve(made)
            for name in ("p0", "p1"):
                await made.command(Suspend(name))
            assert (await given(made, asks("a")))[1] is None

        async with world(POOL, split=SPLIT) as made:
            await all_serve(made)
            for name in ("d0", "d1"):
                die(made, name, restarting=True)
            where, at = await given(made, asks("b"))
            assert where in ("p0", "p1")
            assert at is None

    run(test())


def test_what_the_decoding_engine_has_of_a_prompt_is_not_computed_elsewhere() -> None:
    async def test() -> None:
        async with world(POOL, split=SPLIT) as made:
            await all_serve(made)
            where, at = await given(made, asks("t"))
            assert at is not None
            made.hosts[where].answer("t/0")
            await until(lambda: not made.proxy._where)
            again = msgspec.structs.replace(asks("t", 25), request_id="t/1")
            await occupied(made, "p0", 0.0)
            assert await given(made, again) == (where, None), "five tokens are new"

    run(test())
