"""Sessions that no ticket started: let in by the token, apart by name, recorded, never trained on."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from actors.env.agents import guests, session
from actors.env.agents.protocol import Session
from actors.env.recorder import check_trajectory
from actors.trainer.store import append_record, read_records
from actors.trajectory import Segment
from coordinator.job import JobError, convert
from tests.agents.support import CHAT, ask, asks, world
from tests.support.loops import run, until
from tests.trainer_actor.support import trajectory


def never(session: Session) -> float:
    raise AssertionError("no ticket is given to it")


def guest(directory: Path, name: str, *, token: str = "") -> Session:
    door = json.loads((directory / "control.json").read_text())
    return Session(0, door["base_url"], f"{token or door['token']}.{name}" if name else door["token"], "any")


async def asked(session: Session, text: str, method: str = "POST", path: str = CHAT) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": text}]} if text else None
    return await asyncio.to_thread(ask, session, method, path, body)


def recorded(directory: Path) -> dict[str, str]:
    """Ticket -> what was said."""
    found = {}
    for record, _ in read_records(directory / "control.log"):
        check_trajectory(record)
        found[record.ticket] = "|".join(bytes(each.tokens.tolist()).decode() for each in record.segments)
    return found


def test_each_name_is_a_session_and_what_it_was_answered_is_on_disk_when_the_host_has_stopped(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(never, guests=2, directory=tmp_path) as made:
            for name, text in (("ann", "one"), ("bob", "two"), ("ann", "three")):
                status, answer = await asked(guest(tmp_path, name), text)
                assert status == 200
            assert answer["id"] == "chatcmpl-guest0-ann/1"
            await made.node.stop(made.host)
            assert recorded(tmp_path) == {"guest0-ann": "one\nR|three\nR", "guest1-bob": "two\nR"}
            assert sorted(made.proxy.ended) == ["guest0-ann", "guest1-bob"]
            assert (made.proxy.whole, made.coordinator.outcomes, made.store.kept) == (set(), [], {})

    run(test())


def test_sessions_are_listed_told_and_ended(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(never, guests=2, directory=tmp_path) as made:
            made.proxy.version = 3
            ann, door = guest(tmp_path, "ann"), guest(tmp_path, "")
            await asked(ann, "one")
            status, listed = await asked(door, "", "GET", "/sessions")
            (one,) = listed["data"]
            assert (status, one["name"], one["ended"], one["turns"], one["sampled_tokens"]) == (200, "ann", "", 1, 1)
            _, told = await asked(door, "", "GET", "/sessions/ann")
            assert told["segments"] == [
                {
                    "tokens": list(b"one\nR"),
                    "loss_mask": [0, 0, 0, 0, 1],
                    "logprobs": [0, 0, 0, 0, -0.5],
                    "versions": [-1, -1, -1, -1, 3],
                }
            ]
            status, ended = await asked(door, "", "DELETE", "/sessions/ann")
            assert (status, ended["ended"], ended["turns"]) == (200, "its client has ended it", 1)
            status, answer = await asked(ann, "more")
            assert (status, answer["error"]["code"]) == (410, "session_ended")
            assert (await asked(door, "", "GET", "/sessions/bob"))[0] == 404
            assert (await asked(door, "", "POST", "/sessions/ann"))[0] == 405
            _, listed = await asked(door, "", "GET", "/sessions")
            assert [each["ended"] for each in listed["data"]] == ["its client has ended it"]
            await until((tmp_path / "control.log").exists)

    run(test())


def test_a_long_session_is_told_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, plain = list[threading.Thread](), guests._plain

    def tell(segment: Segment) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return plain(segment)

    monkeypatch.setattr(guests, "_plain", tell)
    monkeypatch.setattr(session, "LARGE", 1000)

    async def test() -> None:
        async with world(never, guests=1, max_model_len=2048, directory=tmp_path):
            door = guest(tmp_path, "")
            here = threading.current_thread()
            await asked(guest(tmp_path, "ann"), "short")
            for method in ("GET", "DELETE"):
                assert (await asked(door, "", method, "/sessions/ann"))[1]["segments"]
            assert threads == [here, here]
            await asked(guest(tmp_path, "bob"), "long" * 100)
            for method in ("GET", "DELETE"):
                (segment,) = (await asked(door, "", method, "/sessions/bob"))[1]["segments"]
                assert len(segment["tokens"]) == len("\nR") + 400
            assert len(threads) == 4
            assert here not in threads[2:]

    run(test())


def test_nobody_comes_in_without_the_token_a_proper_name_and_room(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(never, guests=1, directory=tmp_path) as made:
            assert stat.S_IMODE((tmp_path / "control.json").stat().st_mode) == 0o600
            for session in (guest(tmp_path, "ann", token="guess"), guest(tmp_path, ""), guest(tmp_path, "a/b")):
                assert (await asked(session, "one"))[0] == 401
            assert (await asked(guest(tmp_path, "ann"), "one"))[0] == 200
            status, answer = await asked(guest(tmp_path, "bob"), "one")
            assert (status, answer["error"]["code"]) == (429, "too_many_sessions")
            assert (await made.counters())["guests_refused"] == 1

    run(test())


def test_a_key_that_is_no_text_is_a_wrong_key(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(never, guests=1, directory=tmp_path):
            url = urlsplit(guest(tmp_path, "ann").base_url)
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-\xff\xfe\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"401"
            writer.close()

    run(test())


def test_a_session_ends_when_nothing_is_asked_of_it_but_not_while_an_engine_answers(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(never, guests=1, guest_idle_s=0.5, directory=tmp_path) as made:
            made.proxy.holds = lambda request: True
            answer = asyncio.create_task(asked(guest(tmp_path, "ann"), "one"))
            await until(lambda: made.proxy.held)
            await asyncio.sleep(1.0)
            made.proxy.answer("guest0-ann/0")
            assert (await answer)[0] == 200
            await until((tmp_path / "control.log").exists)
            status, told = await asked(guest(tmp_path, ""), "", "GET", "/sessions/ann")
            assert (status, told["ended"]) == (200, "nothing was asked for 0.5 s (environment.agent.guest_idle_s)")

    run(test())


def test_an_engine_that_fails_ends_the_session_by_name(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(never, guests=1, directory=tmp_path) as made:
            made.faults.of["guest0-ann"] = "engine fails"
            status, answer = await asked(guest(tmp_path, "ann"), "one")
            assert (status, "engine_failed" in answer["error"]["message"]) == (410, True)
            _, told = await asked(guest(tmp_path, ""), "", "GET", "/sessions/ann")
            assert told["ended"].startswith("engine_failed")
            await made.node.stop(made.host)
            assert not (tmp_path / "control.log").exists()  # nothing was sampled

    run(test())


def test_guests_play_beside_the_runs_own_sessions(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(asks(2), guests=1, directory=tmp_path) as made:
            made.start("t1")
            await asked(guest(tmp_path, "ann"), "one")
            assert (await made.outcome("t1")).state == "stored"
            assert list(made.store.kept) == ["t1"]
            assert {request.trajectory: request.urgent for request in made.proxy.requests} == {
                "t1": False,
                "guest0-ann": False,
            }

    run(test())


def test_where_the_job_wants_no_guests_there_is_no_token(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(asks(1), directory=tmp_path) as made:
            made.start("t1")
            assert (await made.outcome("t1")).state == "stored"

    run(test())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_records_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with world(never, guests=1, directory=tmp_path) as made:
            await asked(guest(tmp_path, "ann"), "one")
            (tmp_path / "control.log").mkdir()  # where the file should be
            await made.node.stop(made.host)

    run(test())
    assert "session guest0-ann is not recorded" in caplog.text


def test_records_are_appended_to_a_file_that_a_store_reads(tmp_path: Path) -> None:
    made = [trajectory("a"), trajectory("b")]
    for each in made:
        append_record(tmp_path / "new" / "file.log", each)
    assert [each.ticket for each, _ in read_records(tmp_path / "new" / "file.log")] == ["a", "b"]


@pytest.mark.parametrize("setting", ["guests=-1", "guest_idle_s=0", "host=example.org", "host=0.0.0.0", "timeout_s=0"])
def test_wrong_settings_are_refused_by_name(setting: str) -> None:
    with pytest.raises(JobError, match=f"environment.agent.{setting.partition('=')[0]}"):
        convert({"environment": {"agent": {}}}, "job", [f"environment.agent.{setting}"])
    convert({"environment": {"agent": {"host": "0.0.0.0"}}}, "job", ["coordinator.trusted_network=true"])
