"""A session is a trajectory: what its agent asks are its turns, and however one of them ends, the other does."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from actors.env.agents import answers, bench, server, session
from actors.env.agents.protocol import Result, Session
from actors.env.messages import LearnerVersion, Stop
from actors.env.recorder import check_trajectory
from actors.proxy.messages import RequestFailed
from actors.settings import AgentSettings, EnvironmentSettings
from actors.trajectory import Trajectory
from tests.agents.support import ASK, CHAT, Meeting, World, asks, playing, post, world
from tests.env_manager.support import RIGHT
from tests.support.loops import run, settle, until


def text_of(trajectory: Trajectory, segment: int = 0) -> str:
    return bytes(trajectory.segments[segment].tokens.tolist()).decode()


def test_what_an_agent_asks_are_the_turns_of_a_trajectory_with_its_reward() -> None:
    async def test() -> None:
        async with world(asks(3, reward=0.5)) as made:
            made.proxy.version = 4
            made.start("t1")
            outcome = await made.outcome("t1")
            assert (outcome.state, outcome.turns, outcome.sampled_tokens) == ("stored", 3, 3)
            assert (outcome.env_return, outcome.success, outcome.metrics) == (0.5, True, {"asked": 3.0})
            trajectory = made.store.kept["t1"]
            check_trajectory(trajectory)
            (segment,) = trajectory.segments
            assert text_of(trajectory) == "left or right?\nR\nand now?\nR\nand now?\nR"
            assert np.all(segment.tokens[segment.loss_mask == 1] == RIGHT)
            assert np.all(segment.logprobs[segment.loss_mask == 1] == -0.5)
            assert (trajectory.initiating_version, trajectory.task) == (4, 2)
            assert [request.request_id for request in made.proxy.requests] == ["t1/0", "t1/1", "t1/2"]
            assert made.proxy.requests[2].prompt.tolist() == segment.tokens[:-1].tolist()
            assert (made.proxy.ended, made.proxy.whole) == (["t1"], {"t1"})

    run(test())


def test_sessions_that_run_at_once_are_kept_apart() -> None:
    async def test() -> None:
        def agent(told: Session) -> float:
            barrier.wait(10)
            status, _ = post(told, body={"messages": [{"role": "user", "content": told.api_key}]})
            return float(status == 200)

        barrier = threading.Barrier(4)
        async with world(agent) as made:
            made.start("t1", "t2", "t3", "t4")
            for ticket in ("t1", "t2", "t3", "t4"):
                assert (await made.outcome(ticket)).reward == 10.0
            assert len({text_of(each) for each in made.store.kept.values()}) == 4

    run(test())


def test_an_agent_that_forgets_goes_on_in_a_new_segment_and_the_reason_is_counted() -> None:
    async def test() -> None:
        def agent(told: Session) -> float:
            _, first = post(told)
            answer = first["choices"][0]["message"]
            post(told, body={"messages": [{"role": "user", "content": "shorter"}, answer, *ASK["messages"]]})
            post(told, body={"messages": [{"role": "user", "content": "anew"}]})
            return 1.0

        async with world(agent) as made:
            made.start("t1")
            assert (await made.outcome("t1")).turns == 3
            trajectory = made.store.kept["t1"]
            check_trajectory(trajectory)
            assert [text_of(trajectory, index) for index in range(3)] == [
                "left or right?\nR",
                "shorter\nR\nleft or right?\nR",
                "anew\nR",
            ]
            assert [segment.loss_mask.sum() for segment in trajectory.segments] == [1, 1, 1]
            assert (await made.counters())["agents_new_segment_history_changed"] == 2

    run(test())


def crashes(told: Session) -> float:
    post(told)
    raise KeyError("no such tool")


def ends_the_process(told: Session) -> float:
    post(told)
    raise SystemExit(3)


def says_nothing_of_use(told: Session) -> Any:
    post(told)
    return "well"


def never_asks(told: Session) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("agent", "reason", "detail"),
    [
        (crashes, "agent_failed", "no such tool"),
        (ends_the_process, "agent_failed", "SystemExit: 3"),
        (says_nothing_of_use, "agent_failed", "expected an agent's result to be a finite number, found 'well'"),
        (never_asks, "agent_asked_nothing", "returned without asking"),
    ],
)
def test_an_agent_that_fails_costs_its_trajectory_under_a_name(agent: Any, reason: str, detail: str) -> None:
    async def test() -> None:
        async with world(agent) as made:
            made.start("t1")
            outcome = await made.outcome("t1")
            assert (outcome.state, outcome.reason) == ("lost", reason)
            assert detail in outcome.detail
            assert (made.proxy.ended, made.proxy.whole) == (
                ["t1"],
                {"t1"} if reason == "agent_asked_nothing" else set(),
            )

    run(test())


def test_an_agent_that_outlives_its_deadline_ends_and_is_told_so_when_it_asks_again() -> None:
    async def test() -> None:
        meeting = Meeting()

        def agent(told: Session) -> float:
            post(told)
            meeting.wait()
            meeting.saw.append(post(told))
            return 1.0

        async with world(agent, timeout_s=0.3) as made:
            made.start("t1")
            outcome = await made.outcome("t1")
            assert (outcome.state, outcome.reason) == ("lost", "agent_timeout")
            assert "environment.agent.timeout_s" in outcome.detail
            meeting.may_go_on.set()
            await until(lambda: meeting.saw)
            ((status, answer),) = meeting.saw
            assert status == 410
            assert (answer["error"]["code"], "agent_timeout" in answer["error"]["message"]) == ("session_ended", True)

    run(test())


async def is_stopped(made: World) -> None:
    made.node.tell(made.host, Stop(["t1"], "straggler"))
    assert (await made.outcome("t1")).reason == "straggler"
    assert made.proxy.aborted == ["t1/0"]


async def loses_its_engine(made: World) -> None:
    made.node.tell(made.proxy.held.pop("t1/0"), RequestFailed("t1/0", "engine e0: killed"))
    assert (await made.outcome("t1")).reason == "engine_failed"


async def loses_its_host(made: World) -> None:
    await made.node.stop(made.host)


@pytest.mark.parametrize(
    ("ends", "how"), [(is_stopped, "straggler"), (loses_its_engine, "engine_failed"), (loses_its_host, "cut off")]
)
def test_who_waits_for_an_answer_is_told_at_once_how_its_session_ended(
    ends: Callable[[World], Awaitable[None]], how: str
) -> None:
    async def test() -> None:
        meeting = Meeting()

        def agent(told: Session) -> float:
            meeting.saw.append(post(told))
            return 1.0

        async with world(agent) as made:
            made.proxy.holds = lambda request: True
            made.start("t1")
            await until(lambda: made.proxy.held)
            await ends(made)
            await until(lambda: meeting.saw)
            ((status, answer),) = meeting.saw
            assert (status, answer["error"]["code"]) == (410, "session_ended")
            assert how in answer["error"]["message"]
            assert made.proxy.ended == ["t1"]

    run(test())


@pytest.mark.parametrize(
    ("news", "reason"), [(Stop(["t1"], "straggler"), "straggler"), (LearnerVersion(2, 1), "stale")]
)
def test_a_trajectory_ends_while_its_agent_does_something_else_or_at_its_next_turn(news: Any, reason: str) -> None:
    async def test() -> None:
        meeting = Meeting()

        def agent(told: Session) -> float:
            post(told)
            meeting.saw.append("asked")
            meeting.wait()
            meeting.saw.append(post(told)[0])
            return 1.0

        async with world(agent) as made:
            made.start("t1")
            await until(lambda: meeting.saw)
            made.node.tell(made.host, news)
            await settle()
            meeting.may_go_on.set()
            assert (await made.outcome("t1")).reason == reason
            await until(lambda: meeting.saw == ["asked", 410])
            assert len(made.proxy.requests) == 1

    run(test())


def test_an_agent_that_asks_twice_at_once_ends() -> None:
    async def test() -> None:
        meeting = Meeting()

        def agent(told: Session) -> float:
            beside = threading.Thread(target=lambda: meeting.saw.append(post(told)))
            beside.start()
            meeting.wait()
            meeting.saw.append(post(told, body={**ASK, "max_tokens": 2}))
            beside.join(10)
            return 1.0

        async with world(agent) as made:
            made.proxy.holds = lambda request: True
            made.start("t1")
            await until(lambda: made.proxy.held)
            meeting.may_go_on.set()
            assert (await made.outcome("t1")).reason == "agent_overlapped"
            await until(lambda: len(meeting.saw) == 2)
            assert [status for status, _ in meeting.saw] == [410, 410]

    run(test())


@pytest.mark.parametrize("before", [True, False])
def test_a_request_that_is_repeated_after_its_connection_broke_gets_the_answer_of_the_first(before: bool) -> None:
    """``before``: it is repeated before the engine has answered; else after."""

    async def test() -> None:
        meeting = Meeting()

        def agent(told: Session) -> float:
            url = urlsplit(told.base_url)
            connection = http.client.HTTPConnection(url.netloc, timeout=10)
            headers = {"Authorization": f"Bearer {told.api_key}"}
            connection.request("POST", url.path + CHAT, b'{"messages": [{"role": "user", "content": "?"}]}', headers)
            meeting.wait()
            connection.close()
            meeting.saw.append("broken")
            meeting.saw.append(post(told, body=b'{"messages": [{"role": "user", "content": "?"}]}'))
            return 1.0

        async with world(agent) as made:
            made.proxy.holds = lambda request: request.request_id == "t1/0"
            made.start("t1")
            await until(lambda: made.proxy.held)
            meeting.may_go_on.set()
            await until(lambda: meeting.saw == ["broken"] if before else meeting.saw)
            if before:
                while not (await made.counters()).get("agents_repeated"):
                    await settle()
            made.proxy.answer("t1/0")
            outcome = await made.outcome("t1")
            assert (outcome.state, outcome.turns) == ("stored", 1)
            assert meeting.saw[1][0] == 200
            assert meeting.saw[1][1]["id"] == "chatcmpl-t1/0"
            assert (await made.counters())["agents_repeated"] == 1

    run(test())


def test_an_agent_that_reaches_its_bound_of_turns_is_told_and_may_still_say_how_it_went() -> None:
    async def test() -> None:
        meeting = Meeting()

        def agent(told: Session) -> Result:
            post(told)
            meeting.saw += [post(told, body={"messages": [{"role": "user", "content": str(n)}]}) for n in range(2)]
            return Result(0.25)

        async with world(agent, max_turns=2) as made:
            made.start("t1")
            outcome = await made.outcome("t1")
            assert (outcome.state, outcome.turns, outcome.env_return) == ("stored", 2, 0.25)
            assert [status for status, _ in meeting.saw] == [200, 400]
            assert meeting.saw[1][1]["error"]["code"] == "turn_limit"

    run(test())


@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        ({"max_turns": 2}, "turn_limit"),
        ({"max_model_len": len("left or right?\nR\nand now?\nR\n")}, "context_length_exceeded"),
    ],
)
def test_an_agent_that_fails_over_being_cut_has_earned_nothing(settings: dict[str, Any], cut: str) -> None:
    async def test() -> None:
        async with world(asks(3), **settings) as made:
            made.start("t1")
            outcome = await made.outcome("t1")
            assert (outcome.state, outcome.turns, outcome.env_return, outcome.success) == ("stored", 2, 0.0, False)
            assert outcome.metrics == {cut: 1.0}
            assert (await made.counters())[f"agents_cut_{cut}"] == 1

    run(test())


def test_a_turn_has_as_many_tokens_as_request_job_and_context_allow() -> None:
    async def test() -> None:
        def agent(told: Session) -> float:
            post(told)
            post(told, body={**ASK, "max_tokens": 2})
            post(told, body={**ASK, "max_tokens": 99})
            post(told, body={"messages": [{"role": "user", "content": "x" * 18}]})
            return 1.0

        async with world(agent, max_tokens=4, max_model_len=20) as made:
            made.start("t1")
            assert (await made.outcome("t1")).state == "stored"
            assert [request.max_tokens for request in made.proxy.requests] == [4, 2, 4, 1]

    run(test())


def test_evaluations_are_played_greedily_and_kept_by_nobody() -> None:
    async def test() -> None:
        async with world(asks(2)) as made:
            made.start("e1", purpose="evaluate")
            outcome = await made.outcome("e1")
            assert (outcome.state, outcome.reward) == ("evaluated", 1.0)
            assert {(request.temperature, request.urgent) for request in made.proxy.requests} == {(0.0, True)}
            assert made.store.kept == {}

    run(test())


def test_completions_go_on_from_their_text_or_their_ids() -> None:
    async def test() -> None:
        def agent(told: Session) -> float:
            _, one = post(told, "/completions", {"prompt": "ab"})
            _, two = post(told, "/completions", {"prompt": "ab" + one["choices"][0]["text"] + "cd"})
            ids = [*b"abRcd", *two["choices"][0]["token_ids"], *b"ef"]
            post(told, "/completions", {"prompt": ids})
            post(told, "/completions", {"prompt": "else"})
            return 1.0

        async with world(agent) as made:
            made.start("t1")
            assert (await made.outcome("t1")).turns == 4
            trajectory = made.store.kept["t1"]
            check_trajectory(trajectory)
            assert [text_of(trajectory, 0), text_of(trajectory, 1)] == ["abRcdRefR", "elseR"]

    run(test())


@pytest.mark.parametrize("prompt", [[264], [-1], [10**30], [[1], [2]], ["a", "b"], ""])
def test_a_prompt_that_is_no_text_and_no_token_ids_is_refused_and_costs_nothing(prompt: Any) -> None:
    async def test() -> None:
        meeting = Meeting()

        def agent(told: Session) -> float:
            meeting.saw.append(post(told, "/completions", {"prompt": prompt}))
            return float(post(told)[0])

        async with world(agent) as made:
            made.start("t1")
            assert (await made.outcome("t1")).env_return == 200.0
            ((status, answer),) = meeting.saw
            assert (status, answer["error"]["param"]) == (400, "prompt")

    run(test())


def test_a_fault_of_ours_costs_one_trajectory_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(session, "written", fails)

    async def test() -> None:
        meeting = Meeting()

        def agent(told: Session) -> float:
            tools = [{"type": "function", "function": {"name": "f"}}]
            meeting.saw.append(post(told, body={**ASK, "tools": tools}))
            return 1.0

        async with world(agent) as made:
            made.start("t1")
            outcome = await made.outcome("t1")
            assert (outcome.state, outcome.reason) == ("lost", "internal_error")
            await until(lambda: meeting.saw)
            assert meeting.saw[0][0] == 410

    run(test())


def test_a_worker_with_too_many_agents_that_do_not_return_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MOST_LEFT_BEHIND", 2)

    async def test() -> None:
        meeting = Meeting()

        def agent(told: Session) -> float:
            meeting.wait()
            return 1.0

        async with world(agent, timeout_s=0.1) as made:
            for ticket in ("t1", "t2"):
                made.start(ticket)
                assert (await made.outcome(ticket)).reason == "agent_timeout"
            made.start("t3")
            outcome = await made.outcome("t3")
            assert outcome.reason == "env_worker_died"
            assert "2 agents whose sessions are over have not returned" in outcome.detail
            assert made.pool.killed == ["worker-0"]
            meeting.may_go_on.set()

    run(test())


def test_what_is_large_is_read_and_told_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()
    told = answers.chat_answer

    def tell(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return told(*arguments)

    monkeypatch.setattr(server, "chat_answer", tell)
    monkeypatch.setattr(session, "LARGE", 1)

    async def test() -> None:
        async with world(asks(2)) as made:
            made.start("t1")
            assert (await made.outcome("t1")).state == "stored"
            assert text_of(made.store.kept["t1"]) == "left or right?\nR\nand now?\nR"
            assert threading.current_thread() not in threads
            monkeypatch.setattr(session, "LARGE", 1 << 20)
            made.start("t2")
            assert (await made.outcome("t2")).state == "stored"
            assert threads[2:] == [threading.current_thread()] * 2

    run(test())


def test_an_agent_that_returns_as_its_session_is_cut_off_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MOST_LEFT_BEHIND", 1)
    settings = EnvironmentSettings(name="tests.agents.support:play", agent=AgentSettings())

    async def test() -> None:
        loop, made = asyncio.get_running_loop(), bench.AgentBench(settings, Path.cwd())

        def returns_first(thread: threading.Thread) -> None:
            """On the loop: what the agent returned is in its queue before that its session is cut off."""
            thread.join(10)
            loop.call_soon(cut.cancel)

        def agent(told: Session) -> float:
            loop.call_soon_threadsafe(returns_first, threading.current_thread())
            return 1.0

        playing.append(agent)
        cut = asyncio.create_task(made.run(Session(1, "", "", "")))
        with pytest.raises(asyncio.CancelledError):
            await cut
        playing[-1] = lambda told: 2.0
        assert (await made.run(Session(1, "", "", ""))).reward == 2.0

    try:
        run(test())
    finally:
        playing.pop()
