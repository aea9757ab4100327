"""What the proxy refuses before any engine sees it, and requests for several completions or for certain versions."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.proxy.engines.protocol import Begun, EngineLimits, GenerateRequest
from actors.proxy.engines.seeds import derive
from actors.proxy.messages import Accepted, Acknowledged, Add, EngineReady, Resume, Suspend, Update
from tests.proxy.support import World, abort, request, world
from tests.support.loops import run, until

ABLE = EngineLimits(max_sequences=4, max_model_len=64, vocabulary=100, texts=True)


async def ask(made: World, asked: GenerateRequest) -> str:
    return (await made.node.ask(made.proxy.ref, Add(asked, made.asker.ref), Accepted, timeout_s=5)).engine


def like(**changes: Any) -> GenerateRequest:
    return msgspec.structs.replace(request("t/0"), **changes)


WRONG = {
    "a stop string of nothing": (like(stop=("",)), "stop string '' has 0 bytes, expected 1..256"),
    "too many stop strings": (like(stop=("a",) * 17), "17 stop strings, expected at most 16"),
    "negative stop token": (like(stop_token_ids=(-1,)), "stop token id -1 is outside the vocabulary 0 and above"),
    "too many alternatives": (like(logprobs=21), "logprobs is 21, expected 0..20"),
    "fewer than none": (like(logprobs=-1), "logprobs is -1, expected 0..20"),
    "no completion": (like(n=0), "n is 0, expected 1..256"),
    "too many completions": (like(n=257), "n is 257, expected 1..256"),
    "no token": (like(max_tokens=0), "max_tokens is 0, expected at least 1"),
    "temperature": (like(temperature=3.0), r"temperature is 3.0, expected 0 \(greedy\) or 0.01..2.0"),
    "nothing allowed": (like(allowed_token_ids=()), "no token is allowed"),
    "empty prompt": (like(prompt=np.empty(0, np.int32)), r"prompt is int32 \(0,\), expected at least one"),
    "versions that exclude each other": (
        like(from_version=3, to_version=2),
        "version 3 or newer .* and for 2 or older",
    ),
}


@pytest.mark.parametrize(("wrong", "why"), WRONG.values(), ids=WRONG.keys())
def test_wrong_parameters_are_refused_before_an_engine_is_up(wrong: GenerateRequest, why: str) -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            assert await ask(made, wrong) == ""
            await until(lambda: made.asker.failed)
            ((id_, reason),) = made.asker.failed
            assert id_ == "t/0"
            assert reason.startswith("refused by the proxy: request t/0: ")
            assert re.search(why, reason), reason
            assert (await made.describe()).counters == {"requests_refused": 1, "requests_failed": 1}

    run(test())


async def up(made: World, name: str, limits: EngineLimits) -> None:
    """An engine comes up that can do this, and serves version 0."""
    host = await made.start(name)
    ready = EngineReady(name, host.ref, limits, 0.1)
    await made.node.ask(made.proxy.ref, ready, Acknowledged, timeout_s=5)
    await made.command(Update(name, 0))
    await made.command(Resume(name, 0))
    host.log.clear()


LIMITED = {
    "prompt and completion too long": (like(max_tokens=63), "make 65, but this engine holds 64"),
    "prompt beyond the vocabulary": (like(prompt=np.array([100], np.int32)), "token id 100 is outside .* 0..99"),
    "allowed beyond the vocabulary": (like(allowed_token_ids=(5, 100)), "allowed token id 100 is outside .* 0..99"),
    "stop strings without a tokenizer": (like(stop=("x",)), "has no tokenizer to read tokens with"),
}


@pytest.mark.parametrize(("wrong", "why"), LIMITED.values(), ids=LIMITED.keys())
def test_what_no_engine_can_hold_is_refused_and_reaches_none(wrong: GenerateRequest, why: str) -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            await up(made, "e0", msgspec.structs.replace(ABLE, texts=False))
            await ask(made, wrong)
            await until(lambda: made.asker.failed)
            assert re.search(why, made.asker.failed[0][1]), made.asker.failed
            assert await ask(made, request("good/0")) == "e0"
            await until(lambda: made.hosts["e0"].log)
            assert made.hosts["e0"].log == ["add good/0"]

    run(test())


def test_a_request_that_waited_for_the_first_engine_is_refused_once_its_limits_are_known() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            assert await ask(made, like(max_tokens=63)) == ""
            assert await ask(made, request("good/0")) == ""
            await up(made, "e0", ABLE)
            await until(lambda: made.asker.failed and made.hosts["e0"].log)
            assert re.search("holds 64", made.asker.failed[0][1])
            assert made.hosts["e0"].log == ["add good/0"]

    run(test())


def test_n_completions_are_requests_of_one_trajectory_with_a_seed_each() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            hosts = [await made.serve("e0"), await made.serve("e1")]
            await ask(made, like(n=3, seed=5))
            ids = ["t/0#0", "t/0#1", "t/0#2"]
            await until(lambda: sorted(id_ for host in hosts for id_ in host.held) == ids)
            parts = {id_: one for host in hosts for id_, one in host.requests.items()}
            assert [parts[id_].seed for id_ in ids] == [derive(5, place) for place in range(3)]
            assert len({derive(5, place) for place in range(3)}) == 3
            assert {(one.n, one.trajectory) for one in parts.values()} == {(1, "t")}
            await ask(made, like(n=3, seed=5))
            assert (await made.describe()).counters["repeated_adds"] == 1, "a copy of the same ADD has no effect"
            next(host for host in hosts if "t/0#1" in host.held).answer("t/0#1")
            await until(lambda: made.asker.finished)
            await abort(made, "t/0")
            await until(lambda: len(made.asker.aborted) == 2)
            assert sorted(made.asker.aborted) == ["t/0#0", "t/0#2"]

    run(test())


def test_completions_without_a_seed_have_none() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            await ask(made, like(n=2))
            await until(lambda: len(host.held) == 2)
            assert {one.seed for one in host.requests.values()} == {None}

    run(test())


def test_a_bounded_request_goes_to_an_engine_whose_version_it_may_have() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e0", 3)
            await made.serve("e1", 2)
            for number in range(3):
                assert await ask(made, like(request_id=f"t{number}/0", trajectory=f"t{number}", to_version=2)) == "e1"
            assert await ask(made, like(request_id="pinned/0", from_version=3, to_version=3)) == "e0"

    run(test())


def test_a_request_whose_bound_every_engine_has_passed_ends_superseded_and_keeps_its_tokens() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0", 3)
            begun = Begun(np.array([4, 5], np.int32), np.zeros(2, np.float32), np.array([1, 2], np.int32))
            assert await ask(made, like(to_version=2)) == ""
            assert await ask(made, like(request_id="begun/0", begun=begun, to_version=2)) == ""
            await until(lambda: len(made.asker.finished) == 2)
            assert made.asker.tokens == {"t/0": [], "begun/0": [4, 5]}
            assert made.asker.reasons == {"t/0": "superseded", "begun/0": "superseded"}
            assert host.log == []
            assert (await made.describe()).counters == {"requests_superseded": 2}

    run(test())


def test_a_bounded_request_that_waits_here_is_superseded_by_the_first_version_that_serves() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            await made.start("e0")
            assert await ask(made, like(to_version=1)) == ""
            await made.command(Update("e0", 2))
            await made.command(Resume("e0", 2))
            await until(lambda: made.asker.finished)
            assert made.asker.reasons == {"t/0": "superseded"}

    run(test())


def test_a_bounded_request_waits_with_a_suspended_engine_that_may_still_have_its_version() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e0", 3)
            await made.serve("e1", 2)
            await made.command(Suspend("e1"))
            assert await ask(made, like(to_version=2)) == "e1"

    run(test())
