"""The proxy over scripted engine hosts, on real nodes: requests are routed, moved at their ease and aborted."""

from __future__ import annotations

import asyncio

import pytest

from actors.proxy.messages import Rebalance, Resume, TrajectoryEnded, Update
from tests.proxy.support import abort, played, world
from tests.support.loops import run, until


def test_an_engine_that_holds_more_than_its_share_lets_idle_trajectories_go_where_there_is_room() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e0")
            for index in range(6):
                await played(made, f"t{index}")
            assert await made.add("t0/1", "t0") == "e0"  # it asks for something: it stays
            await made.serve("e1")
            answer = await made.node.ask(made.proxy.ref, Rebalance(), timeout_s=5)
            assert answer.released == {"e0": 3}
            await until(lambda: made.hosts["e0"].log[-1] == "forget t3")
            assert made.hosts["e0"].log[-3:] == ["forget t1", "forget t2", "forget t3"]
            for trajectory in ("t1", "t2", "t3"):
                assert await played(made, trajectory, turn=1) == "e1"
            assert (await made.node.ask(made.proxy.ref, Rebalance(), timeout_s=5)).released == {}

    run(test())


def test_every_request_is_answered_once_by_the_engine_that_took_it() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            hosts = [await made.serve("e0"), await made.serve("e1")]
            went = {f"t{index}/0": await made.add(f"t{index}/0") for index in range(6)}
            assert sorted(went.values()) == ["e0"] * 3 + ["e1"] * 3  # by load
            await until(lambda: sum(len(host.held) for host in hosts) == 6)
            for host in hosts:
                for id_ in list(host.held):
                    host.answer(id_)
            await until(lambda: len(made.asker.finished) == 6)
            assert dict(made.asker.finished) == went
            await until(lambda: made.proxy._tokens == 6)
            state = await made.describe()
            assert [engine.in_flight for engine in state.engines] == [0, 0]
            assert (state.queued, made.asker.failed) == (0, [])

    run(test())


def test_requests_of_one_moment_travel_to_an_engine_together() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            await asyncio.gather(*(made.add(f"t{index}/0") for index in range(10)))
            await until(lambda: len(host.held) == 10)
            assert host.batches == [10]

    run(test())


@pytest.mark.parametrize("when", ["queued", "running", "finished"])
def test_a_repeated_request_id_has_no_second_effect(when: str) -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.start("e0")
            await made.add("t/0")
            if when == "queued":
                assert await made.add("t/0") == ""
            await made.command(Update("e0", 0))
            await made.command(Resume("e0", 0))
            await until(lambda: "t/0" in host.held)
            if when == "running":
                assert await made.add("t/0") == "e0"
            host.answer("t/0")
            await until(lambda: made.proxy._tokens == 1)
            if when == "finished":
                assert await made.add("t/0") == ""
            await made.add("t/1")
            await until(lambda: "t/1" in host.held)
            assert host.log.count("add t/0") == 1
            assert made.asker.finished == [("t/0", "e0")]
            assert (await made.describe()).counters["repeated_adds"] == 1

    run(test())


def test_requests_wait_while_no_engine_serves() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            assert await made.add("a/0") == ""
            host = await made.start("e0")
            assert await made.add("b/0") == ""  # up, but without weights that were proven
            assert (await made.describe()).queued == 2
            await made.command(Update("e0", 3))
            assert host.held == {}
            await made.command(Resume("e0", 3))
            await until(lambda: set(host.held) == {"a/0", "b/0"})
            assert (await made.describe()).queued == 0

    run(test())


def test_the_declared_class_is_used_and_every_fallback_counted() -> None:
    async def test() -> None:
        async with world({"e0": "H20", "e1": "H800"}, {"code": "H800", "default": "H20"}) as made:
            await made.serve("e0")
            assert await made.add("a/0", domain="code") == "e0"
            assert (await made.describe()).counters["affinity_fallbacks"] == 1
            await made.serve("e1")
            assert [await made.add(f"b{index}/0", domain="code") for index in range(3)] == ["e1"] * 3
            assert await made.add("c/0", domain="games") == "e0"
            assert (await made.describe()).counters["affinity_fallbacks"] == 1

    run(test())


def test_turns_of_a_trajectory_go_where_its_prefix_is_until_it_ends() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e0")
            second = await made.serve("e1")
            await made.add("other/0")  # on e0, so that the next one goes to e1
            for turn in range(3):
                assert await made.add(f"t/{turn}") == "e1"
                await until(lambda id_=f"t/{turn}": id_ in second.held)  # type: ignore[misc]
                second.answer(f"t/{turn}")
                await until(lambda count=turn + 1: made.proxy._tokens == count)  # type: ignore[misc]
            made.node.tell(made.proxy.ref, TrajectoryEnded("t"))
            await until(lambda: "forget t" in second.log)
            assert made.proxy._prefixes.holder == {"other": "e0"}

    run(test())


def test_the_end_of_a_trajectory_travels_with_the_next_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.proxy.dispatch.FORGET_WITHIN_S", 1_000.0)

    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            await made.add("t/0")
            made.node.tell(made.proxy.ref, TrajectoryEnded("t"))
            await made.add("u/0")
            await until(lambda: "forget t" in host.log)
            assert host.log[-3:] == ["add t/0", "add u/0", "forget t"]
            assert host.batches == [1, 1]

    run(test())


def test_aborting_a_queued_request_answers_it_at_once() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            await made.add("t/0")
            await abort(made, "t/0")
            await until(lambda: made.asker.failed)
            assert made.asker.failed == [("t/0", "aborted")]
            host = await made.serve("e0")
            await made.add("u/0")
            await until(lambda: host.held)
            assert host.log == ["add u/0"]

    run(test())


def test_aborting_a_running_request_never_overtakes_it_on_its_way_to_the_engine() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            await made.add("t/0")
            await abort(made, "t/0")
            await until(lambda: made.asker.aborted)
            assert host.log == ["add t/0", "abort t/0"]
            await until(lambda: not made.proxy._where)

    run(test())


def test_aborting_what_has_finished_or_was_never_here_does_nothing() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            await made.add("t/0")
            await until(lambda: host.held)
            host.answer("t/0")
            await until(lambda: made.proxy._tokens == 1)
            await abort(made, "t/0")
            await abort(made, "unknown")
            await made.add("t/1")
            await until(lambda: host.held)
            assert host.log == ["add t/0", "add t/1"]
            assert made.asker.failed == []

    run(test())
