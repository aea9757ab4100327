"""Engines that die, come back or are removed: their requests, and who is told."""

from __future__ import annotations

import pytest

from actors.core import Actor, Node, Ref, handler
from actors.proxy.messages import Accepted, Acknowledged, Add, Remove, Served, Suspend, TrajectoryEnded
from actors.proxy.proxy import MAX_MOVES, NoEngineLeft
from actors.weightsync.messages import EngineJoined, EngineLeft
from bus.message import RemoteError
from tests.proxy.support import CRASH, Asker, abort, die, request, world
from tests.support.loops import run, until


def test_requests_of_a_dead_engine_go_to_another() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await made.serve("e0"), await made.serve("e1")
            assert await made.add("t/0") == "e0"
            await until(lambda: first.held)
            die(made, "e0", restarting=True)
            await until(lambda: "t/0" in second.held)
            second.answer("t/0")
            await until(lambda: made.asker.finished)
            assert made.asker.finished == [("t/0", "e1")]
            assert (await made.describe()).counters == {"engine_deaths": 1, "requests_moved": 1}

    run(test())


def test_a_turn_waits_for_the_successor_though_the_one_before_it_is_not_yet_accounted_for() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            await made.add("t/0")
            await made.add("t/1")  # its trajectory has the answer to t/0; the proxy will hear of it a little later
            await until(lambda: len(host.held) == 2)
            die(made, "e0", restarting=True)
            again = await made.serve("e0")
            await until(lambda: "t/1" in again.held)
            assert made.asker.failed == []

    run(test())


def test_requests_of_the_only_engine_wait_for_its_successor() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            await made.serve("e0")
            await made.add("t/0")
            die(made, "e0", restarting=True)
            assert (await made.engine("e0")).state == "dead"
            assert (await made.describe()).queued == 1
            again = await made.serve("e0")
            await until(lambda: "t/0" in again.held)
            assert (await made.engine("e0")).restarts == 1

    run(test())


def test_a_request_that_was_moved_too_often_fails_with_the_reason() -> None:
    async def test() -> None:
        names = [f"e{index}" for index in range(MAX_MOVES + 2)]
        async with world(names) as made:
            for name in names:
                await made.serve(name)
            await made.add("t/0")
            for _ in range(MAX_MOVES + 1):
                die(made, made.proxy._where["t/0"], restarting=True)
            await until(lambda: made.asker.failed)
            assert made.asker.failed == [("t/0", f"engine e3: {CRASH}")]
            assert made.proxy._where == {}
            assert made.failures == []

    run(test())


def test_engines_that_are_removed_by_order_are_not_held_against_their_requests() -> None:
    async def test() -> None:
        names = [f"e{index}" for index in range(MAX_MOVES + 3)]
        async with world(names) as made:
            hosts = {name: await made.serve(name) for name in names}
            await made.add("t/0")
            for _ in range(MAX_MOVES + 1):
                order = Remove(made.proxy._where["t/0"], "it is needed elsewhere")
                await made.node.ask(made.proxy.ref, order, Acknowledged, timeout_s=5)
            die(made, made.proxy._where["t/0"], restarting=True)
            last = hosts[made.proxy._where["t/0"]]
            await until(lambda: "t/0" in last.held)
            assert made.asker.failed == []
            assert "t/0" in made.proxy._moves
            last.answer("t/0")
            await until(lambda: made.asker.finished)
            await until(lambda: not made.proxy._moves)

    run(test())


def test_when_no_engine_is_left_the_run_is_told_and_nothing_fails_that_another_proxy_can_do() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e1")
            await made.add("running/0")
            die(made, "e0", restarting=False)
            assert made.failures == []
            await made.command(Suspend("e1"))
            die(made, "e1", restarting=False)
            assert [str(error) for error in made.failures] == [f"no engine is left; the last, e1: {CRASH}"]
            assert isinstance(made.failures[0], NoEngineLeft)
            assert await made.add("late/0") == ""
            assert (await made.describe()).queued == 2
            assert made.asker.failed == []
            await abort(made, "late/0")
            await until(lambda: made.asker.failed)
            assert made.asker.failed == [("late/0", "aborted")]

    run(test())


def test_queued_requests_still_wait_when_the_last_engine_goes_before_it_ever_served() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            await made.add("t/0")
            die(made, "e0", restarting=False)
            assert [str(error) for error in made.failures] == [f"no engine is left; the last, e0: {CRASH}"]
            assert (await made.describe()).queued == 1
            assert made.asker.failed == []

    run(test())


def test_an_answer_of_an_engine_that_was_declared_dead_does_no_harm() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made, Node("elsewhere") as node:
            first, second = await made.serve("e0"), await made.serve("e1")
            asker = Asker()
            ref = await node.spawn(lambda: asker, "asker")
            await made.node.ask(made.proxy.ref, Add(request("t/0"), ref), Accepted, timeout_s=5)
            await until(lambda: first.held)
            die(made, "e0", restarting=True)
            await until(lambda: second.held)
            first.answer("t/0")  # it was only slow, and whoever asked has not heard of its death
            await until(lambda: asker.finished)
            made.node.tell(made.proxy.ref, Served("e0", ["t/0"], 1))
            await until(lambda: made.proxy._counters["late_answers"])
            assert made.proxy._where == {"t/0": "e1"}  # e1's answer is still expected
            second.answer("t/0")
            await until(lambda: not made.proxy._where)
            await until(lambda: len(asker.finished) == 2)
            assert asker.finished == [("t/0", "e0"), ("t/0", "e1")]
            assert (await made.engine("e1")).in_flight == 0

    run(test())


def test_what_is_in_flight_for_a_trajectory_that_has_ended_is_not_moved() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e0")
            second = await made.serve("e1")
            await made.add("t/0")
            made.node.tell(made.proxy.ref, TrajectoryEnded("t"))
            await made.describe()
            die(made, "e0", restarting=True)
            await until(lambda: made.asker.failed)
            assert made.asker.failed == [("t/0", f"its trajectory has ended, and engine e0: {CRASH}")]
            assert second.log == []
            assert made.proxy._prefixes.holder == {}

    run(test())


def test_what_is_queued_for_a_trajectory_that_has_ended_is_dropped() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            await made.add("t/0")
            await made.add("u/0")
            made.node.tell(made.proxy.ref, TrajectoryEnded("t"))
            await until(lambda: made.asker.failed)
            assert made.asker.failed == [("t/0", "its trajectory has ended")]
            assert list(made.proxy._queued) == ["u/0"]

    run(test())


def test_a_removed_engine_gives_up_its_requests_and_cannot_come_back() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e0")
            second = await made.serve("e1")
            await made.add("t/0")
            await made.node.ask(made.proxy.ref, Remove("e0", "receipt refused"), Acknowledged, timeout_s=5)
            await until(lambda: "t/0" in second.held)
            assert made.fleet.retired == ["e0"]
            assert (await made.engine("e0")).state == "removed"
            with pytest.raises(RemoteError, match="engine e0 was taken out of routing"):
                await made.start("e0")
            die(made, "e0", restarting=False)  # told twice
            assert (await made.describe()).counters["engine_deaths"] == 1

    run(test())


def test_memory_does_not_grow_with_the_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.proxy.proxy.REMEMBERED", 5)

    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            for index in range(20):
                await made.add(f"t{index}/0")
                await until(lambda: host.held)
                host.answer(f"t{index}/0")
                made.node.tell(made.proxy.ref, TrajectoryEnded(f"t{index}"))
                await until(lambda count=index + 1: made.proxy._tokens == count)  # type: ignore[misc]
            await made.describe()
            proxy = made.proxy
            assert (proxy._where, proxy._prefixes.holder, proxy._queued, +proxy._moves) == ({}, {}, {}, {})
            assert len(proxy._finished) == 5

    run(test())


def test_served_reports_of_unknown_engines_are_counted_and_ignored() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            made.node.tell(made.proxy.ref, Served("e9", ["t/0"], 1))
            await until(lambda: made.proxy._counters["late_answers"] == 1)

    run(test())


class Listener(Actor):
    """Stands for the weight-sync actor."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @handler
    async def joined(self, message: EngineJoined) -> None:
        self.log.append(f"joined {message.engine}")

    @handler
    async def left(self, message: EngineLeft) -> None:
        self.log.append(f"left {message.engine}: {message.reason}")


def test_engines_that_come_and_go_are_reported_to_the_weight_sync() -> None:
    async def test() -> list[str]:
        async with world(["e0", "e1"]) as made:
            await made.start("e0")
            listener = Listener()
            ref: Ref = await made.node.spawn(lambda: listener, "weightsync")
            made.proxy.introduce(ref)  # e0 was up before
            await made.start("e1")
            die(made, "e0", restarting=True)
            await made.start("e0")
            await until(lambda: len(listener.log) == 4)
            return listener.log

    assert run(test()) == ["joined e0", "joined e1", f"left e0: {CRASH}", "joined e0"]


def test_what_goes_on_at_another_proxy_fails_at_neither_and_may_come_back() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e0")
            await made.add("running/0")
            die(made, "e0", restarting=True)
            await made.add("queued/0")
            await until(lambda: set(made.proxy._queued) == {"running/0", "queued/0"})
            await made.serve("e1")
            await made.add("late/0")
            for trajectory in ("running", "queued", "late"):
                made.node.tell(made.proxy.ref, TrajectoryEnded(trajectory, whole=False, moved=True))
            await made.describe()
            die(made, "e1", restarting=True)
            await made.describe()
            assert (made.proxy._queued, made.proxy._where, made.asker.failed) == ({}, {}, [])
            await made.add("late/0")
            assert list(made.proxy._queued) == ["late/0"]

    run(test())
