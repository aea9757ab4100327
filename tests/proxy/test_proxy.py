"""The proxy over scripted engine hosts, on real nodes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.core import Actor, Node, Ref, handler
from actors.proxy.messages import (
    Abort,
    Accepted,
    Acknowledged,
    Add,
    Progress,
    Rebalance,
    Remove,
    Resume,
    Served,
    Suspend,
    TrajectoryEnded,
    Update,
)
from actors.proxy.proxy import MAX_MOVES, NoEngineLeft
from actors.weightsync.messages import EngineJoined, EngineLeft
from bus.message import PeerLost, RemoteError
from tests.proxy.support import Asker, World, request, world
from tests.support.loops import run, until

CRASH = "process ended: killed by SIGKILL"


def die(made: World, name: str, *, restarting: bool) -> None:
    made.proxy.engine_died(name, CRASH, restarting=restarting)


async def abort(made: World, id_: str) -> None:
    await made.node.ask(made.proxy.ref, Abort(id_), Acknowledged, timeout_s=5)


# ---- rebalancing ---------------------------------------------------------------------------------------------------


async def played(made: World, trajectory: str, turn: int = 0) -> str:
    """One turn of a trajectory is answered; returns by which engine, which holds its prefix from now on."""
    id_ = f"{trajectory}/{turn}"
    engine = await made.add(id_, trajectory)
    await until(lambda: id_ in made.hosts[engine].held)
    made.hosts[engine].answer(id_)
    await until(lambda: id_ not in made.proxy._engines[engine].in_flight)
    return engine


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


# ---- ADD -----------------------------------------------------------------------------------------------------------


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
            assert made.proxy._holder == {"other": "e0"}

    run(test())


def test_the_end_of_a_trajectory_travels_with_the_next_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.proxy.proxy.FORGET_WITHIN_S", 1_000.0)

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


# ---- ABORT ---------------------------------------------------------------------------------------------------------


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


# ---- SUSPEND, UPDATE, RESUME ---------------------------------------------------------------------------------------


def test_a_suspended_engine_takes_requests_only_where_no_other_serves() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e0")
            await made.serve("e1")
            await made.command(Suspend("e0"))
            assert [await made.add(f"a{index}/0") for index in range(3)] == ["e1"] * 3
            await made.command(Suspend("e1"))
            assert await made.add("b/0") == "e0"
            await made.command(Resume("e0"))
            assert (await made.engine("e0")).state == "serving"
            assert await made.add("c/0") == "e0"

    run(test())


def test_a_command_for_all_reaches_all_that_can_take_it() -> None:
    async def test() -> None:
        async with world(["e0", "e1", "e2"]) as made:
            hosts = [await made.serve("e0"), await made.serve("e1"), await made.start("e2")]
            await made.command(Suspend())
            assert [host.log for host in hosts] == [["suspend"], ["suspend"], []]
            await made.command(Resume())
            assert [engine.state for engine in (await made.describe()).engines] == ["serving", "serving", "cold"]

    run(test())


def test_an_update_brings_the_engines_receipt() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            await made.command(Suspend("e0"))
            done = await made.command(Update("e0", 4))
            assert done.version == 4
            assert done.receipt is not None
            assert (done.receipt.version, done.receipt.engine) == (4, "e0")
            await made.command(Resume("e0", 4))
            assert host.log == ["suspend", "update 4", "resume"]
            assert (await made.engine("e0")).version == 4

    run(test())


def test_an_engine_without_an_accepted_receipt_is_resumed_by_nobody() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            await made.command(Suspend("e0"))
            host.fails_update = ["digest differs"]
            with pytest.raises(RemoteError, match="digest differs"):
                await made.command(Update("e0", 1))
            with pytest.raises(ValueError, match="engine e0 has no accepted receipt"):
                await made.command(Resume("e0"))
            await made.command(Resume())  # all that can: none
            assert "resume" not in host.log
            assert (await made.engine("e0")).state == "suspended"

    run(test())


def test_the_first_answer_to_a_command_does_not_wait_for_the_engine() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            host = await made.serve("e0")
            host.suspends_at_once.clear()
            progress: Any = Progress
            answers = made.node.stream(made.proxy.ref, Suspend("e0"), progress, timeout_s=5)
            assert await anext(aiter(answers)) == Accepted("e0")
            second = asyncio.ensure_future(anext(answers))
            await until(lambda: host.log == ["suspend"])
            assert not second.done()
            die(made, "e0", restarting=False)
            with pytest.raises(PeerLost, match="SIGKILL"):
                await second

    run(test())


def test_a_command_to_an_unknown_engine_names_those_that_there_are() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            with pytest.raises(ValueError, match="no engine 'e7'; there are e0, e1"):
                await made.answers(Suspend("e7"))

    run(test())


# ---- death ---------------------------------------------------------------------------------------------------------


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


def test_when_no_engine_is_left_everything_fails_and_the_run_is_told() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await made.serve("e1")
            await made.add("running/0")
            die(made, "e0", restarting=False)
            assert made.failures == []
            await made.command(Suspend("e1"))
            die(made, "e1", restarting=False)
            await until(lambda: len(made.asker.failed) == 1)
            assert made.asker.failed == [("running/0", f"engine e1: {CRASH}")]
            assert [str(error) for error in made.failures] == [f"no engine is left; the last, e1: {CRASH}"]
            assert isinstance(made.failures[0], NoEngineLeft)
            await made.add("late/0")
            await until(lambda: len(made.asker.failed) == 2)
            assert made.asker.failed[1] == ("late/0", "no engine is left")

    run(test())


def test_queued_requests_fail_when_the_last_engine_goes_before_it_ever_served() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            await made.add("t/0")
            die(made, "e0", restarting=False)
            await until(lambda: made.asker.failed)
            assert made.asker.failed == [("t/0", f"no engine is left; the last, e0: {CRASH}")]

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
            assert made.proxy._holder == {}

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
            assert (proxy._where, proxy._holder, proxy._queued, +proxy._moves) == ({}, {}, {}, {})
            assert len(proxy._finished) == 5

    run(test())


def test_served_reports_of_unknown_engines_are_counted_and_ignored() -> None:
    async def test() -> None:
        async with world(["e0"]) as made:
            made.node.tell(made.proxy.ref, Served("e9", ["t/0"], 1))
            await until(lambda: made.proxy._counters["late_answers"] == 1)

    run(test())


# ---- weight-sync is told -------------------------------------------------------------------------------------------


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
