"""Tokens that outlive the engine which sampled them: what is reported, what is kept, what goes along."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from actors.core import Ref
from actors.proxy.engines.protocol import Begun, GenerateRequest
from actors.proxy.kept import Kept, Reports, pack, unpack, with_begun
from actors.proxy.messages import Accepted, Acknowledged, Add
from bus.message import NodeAddress
from bus.virtual_time import run as run_virtually
from tests.proxy.hosted import world as hosted
from tests.proxy.support import ScriptedHost, World, die, world
from tests.scheduling.heat import Play, Town, town
from tests.support.loops import run, until

ASKER = Ref(NodeAddress("n", "inproc://n", "inproc://n"), "asker")


def part(first: int, count: int, version: int = 0) -> Begun:
    """Tokens that say where they belong."""
    places = np.arange(first, first + count, dtype=np.int32)
    return Begun(places, -places.astype(np.float32), np.full(count, version, np.int32))


def add(id_: str = "t/0", *, max_tokens: int = 20, begun: Begun | None = None) -> Add:
    return Add(GenerateRequest(id_, "t", np.array([1, 2], np.int32), max_tokens, begun=begun), ASKER)


def kept_of(kept: Kept, one: Add) -> list[int]:
    begun = kept.along(one).request.begun
    return [] if begun is None else begun.tokens.tolist()


# ---- what an engine's host reports ---------------------------------------------------------------------------------


def test_a_request_is_reported_from_its_second_period_on_behind_what_it_brought() -> None:
    reports = Reports()
    assert reports.due({"a": 0}, {"a": 3}) == []
    assert reports.due({"a": 0, "b": 0}, {"a": 3}) == [("a", 3)]
    reports.told([("a", 3, part(3, 4))])
    assert reports.due({"a": 0, "b": 0}, {"a": 3}) == [("a", 7), ("b", 0)]
    assert reports.due({"b": 0}, {}) == [("b", 0)], "what was not acknowledged is told again"
    assert reports.due({"a": 0, "b": 0}, {"a": 9}) == [("b", 0)], "one that has come back begins anew"


def test_a_report_is_the_same_when_it_is_unpacked() -> None:
    parts = [("a", 0, part(0, 3)), ("b", 5, part(5, 1, 2))]
    again = [(id_, since, [x.tolist() for x in (b.tokens, b.logprobs, b.versions)]) for id_, since, b in _packed(parts)]
    assert again == [("a", 0, [[0, 1, 2], [0, -1, -2], [0, 0, 0]]), ("b", 5, [[5], [-5], [2]])]


def _packed(parts: list[tuple[str, int, Begun]]) -> list[tuple[str, int, Begun]]:
    return list(unpack(pack("e0", parts)))


def test_a_host_says_what_its_engine_has_sampled_of_requests_that_go_on() -> None:
    """A scripted engine's tokens count up from 0. The first report is refused: the next one has all."""

    async def test() -> None:
        async with hosted(tokens_every_s=0.02) as made:
            made.peer.refuses_reports = 1
            await made.begin()
            made.add("long", tokens=10**9)
            await until(lambda: len(made.peer.told.get("long", ())) > 100)
            told = len(made.peer.told["long"])
            await until(lambda: len(made.peer.told["long"]) > told)
            assert made.peer.told["long"] == list(range(len(made.peer.told["long"])))
            assert made.peer.refuses_reports == 0
            assert made.peer.finished == []

    run(test())


# ---- what the proxy keeps ------------------------------------------------------------------------------------------


def test_reports_add_up_and_go_along_behind_what_the_request_had() -> None:
    counters: Counter[str] = Counter()
    kept, one = Kept(counters), add(begun=part(0, 2))
    for since, count in ((2, 3), (5, 1)):
        kept.take(pack("e0", [("t/0", since, part(since, count, since))]), {"t/0": one})
    along = kept.along(one).request.begun
    assert along is not None
    assert along.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert along.logprobs.tolist() == [0, -1, -2, -3, -4, -5]
    assert along.versions.tolist() == [0, 0, 2, 2, 2, 5]
    assert counters == {"tokens_kept": 4}
    assert kept_of(kept, one) == [0, 1], "they go along once"


def test_a_report_that_comes_twice_or_overlaps_adds_what_is_new() -> None:
    kept, one = Kept(Counter()), add()
    for since, count in ((0, 3), (0, 3), (1, 4)):
        kept.take(pack("e0", [("t/0", since, part(since, count))]), {"t/0": one})
    assert kept_of(kept, one) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("since", "count"), [(4, 1), (3, 17)], ids=["a gap", "all that it may have"])
def test_what_no_request_could_go_on_from_is_not_kept_and_counted(since: int, count: int) -> None:
    counters: Counter[str] = Counter()
    kept, one = Kept(counters), add()
    kept.take(pack("e0", [("t/0", 0, part(0, 3)), ("t/0", since, part(since, count))]), {"t/0": one})
    assert kept_of(kept, one) == [0, 1, 2]
    assert counters == {"reports_not_kept": 1, "tokens_kept": 3}


def test_what_an_engine_is_not_known_to_have_is_not_kept() -> None:
    kept = Kept(Counter())
    kept.take(pack("e0", [("t/0", 0, part(0, 3))]), {})
    assert len(kept) == 0


def test_a_request_that_its_engine_gave_back_with_more_keeps_that() -> None:
    kept, one = Kept(Counter()), add()
    kept.take(pack("e0", [("t/0", 0, part(0, 3))]), {"t/0": one})
    assert kept_of(kept, with_begun(one, part(0, 5))) == [0, 1, 2, 3, 4]
    assert len(kept) == 0


# ---- over an engine's death ----------------------------------------------------------------------------------------


async def _at_work(made: World, *versions: int) -> list[ScriptedHost]:
    """Engines of these versions, the first of which has a request and has told of it twice."""
    hosts = [await made.serve(f"e{index}", version) for index, version in enumerate(versions)]
    one = Add(add().request, made.asker.ref, keeps=True)
    assert await made.node.ask(made.proxy.ref, one, Accepted, timeout_s=5) == Accepted("e0")
    await until(lambda: "t/0" in hosts[0].held)
    for since, count in ((0, 3), (3, 2)):
        report = pack("e0", [("t/0", since, part(since, count, versions[0]))])
        await made.node.ask(made.proxy.ref, report, Acknowledged, timeout_s=5)
    return hosts


def test_a_request_goes_on_behind_the_tokens_that_its_dead_engine_has_told_of() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            _, second = await _at_work(made, 1, 2)
            die(made, "e0", restarting=True)
            await until(lambda: "t/0" in second.held)
            begun = second.requests["t/0"].begun
            assert begun is not None
            assert begun.tokens.tolist() == [0, 1, 2, 3, 4]
            assert begun.versions.tolist() == [1] * 5
            counters = (await made.describe()).counters
            assert counters == {"engine_deaths": 1, "requests_moved": 1, "tokens_kept": 5}
            die(made, "e1", restarting=True)
            again = await made.serve("e0", 2)
            await until(lambda: "t/0" in again.held)
            second_time = again.requests["t/0"].begun
            assert second_time is not None
            assert second_time.tokens.tolist() == [0, 1, 2, 3, 4], "nothing was told by the second one"

    run(test())


def test_tokens_of_a_newer_version_than_any_engine_has_are_dropped_and_counted() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            _, second = await _at_work(made, 2, 1)
            die(made, "e0", restarting=True)
            await until(lambda: "t/0" in second.held)
            assert second.requests["t/0"].begun is None
            assert (await made.describe()).counters["tokens_dropped"] == 5

    run(test())


def test_who_asked_is_told_of_what_was_taken_and_of_nothing_twice() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            _, second = await _at_work(made, 1, 2)
            assert made.asker.kept == {"t/0": [(0, [0, 1, 2]), (3, [3, 4])]}
            again = pack("e0", [("t/0", 4, part(4, 3))])
            await made.node.ask(made.proxy.ref, again, Acknowledged, timeout_s=5)
            die(made, "e0", restarting=True)
            await until(lambda: "t/0" in second.held)
            late = pack("e0", [("t/0", 7, part(7, 3))])  # of the dead one
            await made.node.ask(made.proxy.ref, late, Acknowledged, timeout_s=5)
            own = pack("e1", [("t/0", 7, part(7, 1))])
            await made.node.ask(made.proxy.ref, own, Acknowledged, timeout_s=5)
            await until(lambda: len(made.asker.kept["t/0"]) == 4)
            assert made.asker.kept["t/0"][2:] == [(5, [5, 6]), (7, [7])]

    run(test())


def test_what_was_answered_is_not_kept() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            (host,) = await _at_work(made, 0)
            assert len(made.proxy._kept) == 1
            host.answer("t/0")
            await until(lambda: not made.proxy._where)
            assert len(made.proxy._kept) == 0

    run(test())


def test_tokens_outlive_simulated_engines_and_none_that_was_told_is_sampled_again() -> None:
    """Two engines in turn die under sixteen requests of 1,500 tokens; every token is sampled by one engine only, but
    for those since the last report."""

    async def test() -> tuple[Town, int]:
        async with town({"e0": "H20", "e1": "H20", "e2": "H20"}, tokens_every_s=1.0) as made:
            for name in made.classes:
                await made.serve(name)
            played = [made.players.begin(f"t{index}", Play(turns=1, response=1_500)) for index in range(16)]
            await made.go_on(3)
            await made.kill("e0")
            await made.go_on(3)
            await made.serve("e0")
            await made.kill("e1")
            for task in played:
                await task
            await made.go_on(2)
            return made, (await made.describe()).counters["tokens_kept"]

    made, kept = run_virtually(test())
    assert made.players.wrong == made.players.failures == []
    assert len(made.players.answers) == 16
    assert set(made.players.answers.values()) == {1}
    assert kept > 0
    assert made.proxy._tokens + kept == 16 * 1_500
