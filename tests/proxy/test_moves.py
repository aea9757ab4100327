"""Moves by order, between scripted engine hosts: every request is answered once, and takes its tokens along."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from actors.core import Node
from actors.proxy.engines.load import EngineLoad
from actors.proxy.engines.protocol import Begun
from actors.proxy.messages import (
    Abort,
    Accepted,
    Acknowledged,
    Add,
    EngineState,
    MoveTrajectories,
    Moving,
    Resume,
    Served,
    Suspend,
    TrajectoryEnded,
    Update,
)
from actors.proxy.moving import KEEP_S, Moves
from bus.message import RemoteError, Superseded
from tests.proxy.support import ScriptedHost, World, die, played, request, world
from tests.support.loops import run, until

SAMPLED = Begun(np.array([5, 6, 7], np.int32), np.array([-1, -2, -3], np.float32), np.array([0, 0, 1], np.int32))


async def move(made: World, count: int, source: str = "e0", target: str = "e1") -> Moving:
    order = MoveTrajectories(source, target, count, "too busy")
    return await made.node.ask(made.proxy.ref, order, Moving, timeout_s=5)


async def counters(made: World) -> dict[str, int]:
    return (await made.describe()).counters


async def busy(made: World, *ids: str, version: int = 1) -> tuple[ScriptedHost, ScriptedHost]:
    """Two engines of one version, and requests at the first of them."""
    first = await made.serve("e0", version)
    for id_ in ids:
        await made.add(id_)
    await until(lambda: set(first.held) == set(ids))
    return first, await made.serve("e1", version)


# ---- what goes -----------------------------------------------------------------------------------------------------


def test_a_running_request_goes_on_elsewhere_with_its_tokens_and_their_versions() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await busy(made, "t/0")
            first.sampled["t/0"] = SAMPLED
            assert await move(made, 1) == Moving(asked=1)
            await until(lambda: "t/0" in second.held)
            begun = second.requests["t/0"].begun
            assert begun is not None
            assert begun.tokens.tolist() == [5, 6, 7]
            assert begun.logprobs.tolist() == [-1, -2, -3]
            assert begun.versions.tolist() == [0, 0, 1]
            assert first.held == {}
            second.answer("t/0")
            await until(lambda: made.asker.finished)
            assert made.asker.finished == [("t/0", "e1")]
            await until(lambda: made.proxy._where == {})
            assert await counters(made) == {"moves_ordered": 1, "moved_running": 1, "moved_tokens": 3}

    run(test())


def test_waiting_requests_go_first_the_youngest_before_the_older_and_idle_trajectories_go_as_well() -> None:
    """Four places: t4 and t5 wait. What they have is nothing; t0 is idle, with as short a prefix as the rest."""

    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first = await made.serve("e0", 1)
            assert await played(made, "idle") == "e0"
            ids = [f"t{number}/0" for number in range(6)]
            for id_ in ids:
                await made.add(id_)
            await until(lambda: set(first.held) == set(ids))
            second = await made.serve("e1", 1)
            assert await move(made, 3) == Moving(idle=1, asked=2)
            await until(lambda: set(second.held) == {"t4/0", "t5/0"})
            assert [line for line in first.log if "release" in line] == ["release t5/0", "release t4/0"]
            await until(lambda: first.log[-1] == "forget idle")
            assert await made.add("idle/1") == "e1"
            counted = {"moves_ordered": 1, "moved_idle": 1, "moved_waiting": 2}
            assert await counters(made) == counted

    run(test())


def test_a_request_that_has_not_been_sent_yet_never_reaches_the_source() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await busy(made)
            order = MoveTrajectories("e0", "e1", 1, "too busy")
            # Both within one turn of the loop, which does not end before a handler waits for something.
            assert await made.proxy.add(Add(request("t/0"), made.asker.ref)) == Accepted("e0")
            assert await made.proxy.move(order) == Moving(unsent=1)
            await until(lambda: "t/0" in second.held)
            await made.describe()
            assert first.log == []

    run(test())


def test_what_is_answered_before_it_is_let_go_is_not_moved() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await busy(made, "t/0", "u/0")
            first.releases_at_once.clear()
            assert await move(made, 2) == Moving(asked=2)
            first.answer("t/0")
            first.releases_at_once.set()
            await until(lambda: "u/0" in second.held)
            second.answer("u/0")
            await until(lambda: len(made.asker.finished) == 2)
            await until(lambda: made.proxy._where == {})
            assert sorted(made.asker.finished) == [("t/0", "e0"), ("u/0", "e1")]
            assert made.asker.failed == []

    run(test())


# ---- no ping-pong --------------------------------------------------------------------------------------------------


def test_a_trajectory_that_was_moved_neither_goes_back_nor_on_within_the_cool_down() -> None:
    async def test() -> None:
        async with world(["e0", "e1", "e2"]) as made:
            _, second = await busy(made, "t/0")
            await made.serve("e2", 1)
            assert await move(made, 1) == Moving(asked=1)
            await until(lambda: "t/0" in second.held)
            refused = "engine e1 has no trajectory that was not moved lately"
            assert await move(made, 1, "e1", "e0") == Moving(refused=refused)
            second.answer("t/0")
            for name in ("e1", "e0"):
                await made.command(Suspend(name))
            for number in range(3):
                assert await made.add(f"u{number}/0") == "e2"
            await made.command(Resume("e0", 1))
            assert await made.add("t/1") == "e2", "though e0 has less to do"
            die(made, "e2", restarting=False)
            assert made.proxy._where["t/1"] == "e0", "where no other engine serves it may go back"
            assert (await counters(made))["moves_refused_nothing_to_move"] == 1

    run(test())


def test_places_that_were_emptied_on_purpose_are_not_filled_at_once() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            _, second = await busy(made, "t/0", "u/0")
            await move(made, 1)
            await until(lambda: second.held)
            assert made.proxy._engines["e0"].load == made.proxy._engines["e1"].load + 0.25
            assert await made.add("v/0") == "e1"

    run(test())


def test_what_is_remembered_of_moves_ends_with_the_cool_down() -> None:
    moves = Moves()
    moves.note(["t"], "e0", "e1", 2, now=100.0)
    moves.note(["u"], "e0", "e1", 1, now=130.0)
    assert moves.barred("t", 100.0 + KEEP_S - 1) == "e0"
    assert moves.barred("t", 100.0 + KEEP_S) is None
    assert [moves.emptied("e0", now) for now in (131.0, 100.0 + KEEP_S, 130.0 + KEEP_S)] == [3, 1, 0]
    assert moves.ago("e0", 140.0) == (10.0, None)
    assert moves.ago("e1", 140.0) == (None, 10.0)
    moves.ended("u")
    assert moves.barred("u", 131.0) is None


# ---- what happens meanwhile ----------------------------------------------------------------------------------------


def test_an_abort_during_a_move_is_answered_once_with_the_tokens() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await busy(made, "t/0")
            first.sampled["t/0"] = SAMPLED
            first.releases_at_once.clear()
            await move(made, 1)
            held = first.held.pop("t/0")  # the engine has let it go when the ABORT comes: it does not answer that
            await made.node.ask(made.proxy.ref, Abort("t/0"), Acknowledged, timeout_s=5)
            await until(lambda: first.log[-1] == "abort t/0")
            first.held["t/0"] = held
            first.releases_at_once.set()
            await until(lambda: made.asker.aborted)
            assert made.asker.aborted == ["t/0"]
            assert made.asker.tokens["t/0"] == [5, 6, 7]
            await until(lambda: made.proxy._where == {})
            assert second.log == []
            assert (await made.engine("e0")).in_flight == 0

    run(test())


def test_a_trajectory_that_ends_during_a_move_is_not_played_on() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await busy(made, "t/0")
            first.releases_at_once.clear()
            await move(made, 1)
            made.node.tell(made.proxy.ref, TrajectoryEnded("t"))
            await made.describe()
            first.releases_at_once.set()
            await until(lambda: made.asker.failed)
            assert made.asker.failed == [("t/0", "its trajectory has ended")]
            assert not [line for line in second.log if "add" in line]
            assert made.proxy._where == {}

    run(test())


@pytest.mark.parametrize("restarting", [True, False])
def test_a_source_that_dies_in_the_middle_of_a_move_loses_nothing_and_doubles_nothing(restarting: bool) -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await busy(made, "t/0", "u/0")
            first.sampled["t/0"] = SAMPLED
            first.releases_at_once.clear()
            await move(made, 1)
            die(made, "e0", restarting=restarting)
            first.releases_at_once.set()  # its answer comes too late
            await until(lambda: set(second.held) == {"t/0", "u/0"})
            for id_ in ("t/0", "u/0"):
                second.answer(id_)
            await until(lambda: made.proxy._where == {})
            assert sorted(made.asker.finished) == [("t/0", "e1"), ("u/0", "e1")]
            assert second.log.count("add t/0") == second.log.count("add u/0") == 1
            assert made.proxy._mover._leaving == {}

    run(test())


def test_a_target_that_dies_leaves_a_request_the_tokens_that_it_came_with() -> None:
    async def test() -> None:
        async with world(["e0", "e1", "e2"]) as made:
            first, second = await busy(made, "t/0")
            first.sampled["t/0"] = SAMPLED
            await move(made, 1)
            await until(lambda: "t/0" in second.held)
            third = await made.serve("e2", 1)
            die(made, "e1", restarting=True)
            await until(lambda: "t/0" in third.held)
            begun = third.requests["t/0"].begun
            assert begun is not None
            assert begun.tokens.tolist() == [5, 6, 7]

    run(test())


def test_an_engine_that_does_not_say_what_it_let_go_costs_a_second_answer_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.proxy.mover.RELEASE_TIMEOUT_S", 0.1)

    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await busy(made, "t/0")
            first.answers_releases = False
            await move(made, 1)
            await until(lambda: "t/0" in second.held)
            assert second.requests["t/0"].begun is None
            made.node.tell(made.proxy.ref, Served("e0", ["t/0"], 1))  # it had answered, after all
            await until(lambda: made.proxy._counters["late_answers"])
            assert made.proxy._where == {"t/0": "e1"}
            assert (await counters(made))["moves_unanswered"] == 1

    run(test())


# ---- versions ------------------------------------------------------------------------------------------------------


def test_tokens_never_go_to_an_engine_of_an_older_version() -> None:
    """Its next turn is played there; the request that runs ends where it is."""

    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first = await made.serve("e0", 2)
            await made.add("t/0")
            await until(lambda: first.held)
            second = await made.serve("e1", 1)
            assert await move(made, 1) == Moving()
            assert "t/0" in first.held
            first.answer("t/0")
            assert await made.add("t/1") == "e1"
            await until(lambda: set(second.held) == {"t/1"})

    run(test())


def test_tokens_that_no_engine_can_go_on_with_are_dropped_and_counted() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await busy(made, "t/0")
            first.sampled["t/0"] = SAMPLED
            first.releases_at_once.clear()
            await move(made, 1)
            made.proxy._engines["e0"].version = made.proxy._engines["e1"].version = 0  # as if rolled back
            first.releases_at_once.set()
            await until(lambda: "t/0" in second.held)
            assert second.requests["t/0"].begun is None
            assert (await counters(made))["tokens_dropped"] == 3

    run(test())


def test_tokens_wait_for_an_engine_that_can_go_on_with_them_while_none_serves() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await busy(made, "t/0")
            first.sampled["t/0"] = SAMPLED
            first.releases_at_once.clear()
            await move(made, 1)
            for name in ("e0", "e1"):
                await made.command(Suspend(name))
                await made.command(Update(name, 2))
            first.releases_at_once.set()
            await until(lambda: made.proxy._queued)
            await made.command(Resume("e1", 2))
            await until(lambda: "t/0" in second.held)
            begun = second.requests["t/0"].begun
            assert begun is not None
            assert begun.versions.tolist() == [0, 0, 1]

    run(test())


# ---- orders that are refused ---------------------------------------------------------------------------------------


def test_an_order_that_cannot_be_carried_out_moves_nothing_and_says_why() -> None:
    async def test() -> None:
        async with world(["e0", "e1", "e2"]) as made:
            first, _ = await busy(made, "t/0")
            await made.command(Suspend("e1"))
            assert (await move(made, 1)).refused == "engine e1, which is to receive, is suspended"
            assert (await move(made, 1, "e2", "e0")).refused == "engine e2, which is to give, is starting"
            assert (await move(made, 1, "e0", "e0")).refused == "engine e0 is both source and target"
            with pytest.raises(ValueError, match="no engine 'e9'; there are e0, e1, e2"):
                await move(made, 1, "e9", "e0")
            assert "t/0" in first.held
            assert await counters(made) == {
                "moves_refused_target_not_serving": 1,
                "moves_refused_source_not_serving": 1,
                "moves_refused_same_engine": 1,
            }

    run(test())


def test_an_order_of_an_old_leader_is_refused_once_the_proxy_has_heard_of_the_next() -> None:
    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            first, second = await busy(made, "t/0", "u/0")
            order = MoveTrajectories("e0", "e1", 1, "too busy")
            async with Node("leader", epoch=1) as old, Node("leader", epoch=2) as new:
                assert (await old.ask(made.proxy.ref, order, Moving, timeout_s=5)).asked == 1
                await until(lambda: len(second.held) == 1)
                await new.ask(made.proxy.ref, msgspec.structs.replace(order, trajectories=0), Moving, timeout_s=5)
                with pytest.raises(Superseded):
                    await old.ask(made.proxy.ref, order, Moving, timeout_s=5)
            assert len(first.held) == 1
            assert (await counters(made))["moved_waiting"] == 1

    run(test())


# ---- what the engines say ------------------------------------------------------------------------------------------


def test_the_load_that_an_engine_tells_is_shown_with_its_age_and_is_gone_with_it() -> None:
    load = EngineLoad(figure="gpu_utilisation", load=0.9, occupancy=0.5, busy=1.0, devices=("GPU-1",))

    async def test() -> None:
        async with world(["e0", "e1"]) as made:
            await busy(made, "t/0")
            made.node.tell(made.proxy.ref, Served("e0", [], 0, load))
            shown: EngineState = await made.engine("e0")
            while shown.load is None:
                shown = await made.engine("e0")
            assert (shown.load, shown.trajectories) == (load, 1)
            assert 0 <= shown.load_age_s < 5
            assert (shown.gave_s, shown.took_s) == (None, None)
            await move(made, 1)
            gave, took = (await made.engine("e0")).gave_s, (await made.engine("e1")).took_s
            assert gave is not None
            assert took is not None
            die(made, "e0", restarting=True)
            made.node.tell(made.proxy.ref, Served("e0", [], 0, load))  # a late word of the dead one
            gone: Any = await made.engine("e0")
            assert (gone.load, gone.gave_s) == (None, None)

    run(test())


def test_an_order_with_an_unknown_engine_is_the_askers_error() -> None:
    async def test() -> None:
        async with world(["e0"]) as made, Node("elsewhere") as node:
            await made.serve("e0")
            order = MoveTrajectories("e0", "e9", 1, "too busy")
            with pytest.raises(RemoteError, match="no engine 'e9'"):
                await node.ask(made.proxy.ref, order, Moving, timeout_s=5)

    run(test())
