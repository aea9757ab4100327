"""What became of hosts is told by whoever leads, and by nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from bus.virtual_time import run
from coordinator.hostbook import HostBook
from coordinator.leadership import Candidate
from coordinator.metadata.simulated import SimulatedServer
from coordinator.observe.lines import seize

SESSION_S = 3.0
RUN = "20261130-frozenlake"


def told(path: Path) -> list[tuple[str, str]]:
    """Event and host of every line."""
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    return [(line["event"], line["host"]) for line in lines]


def test_what_is_seen_in_doubt_is_written_in_its_order_once_that_is_over(tmp_path: Path) -> None:
    path, leads = tmp_path / "hosts.jsonl", [True]
    book = HostBook(path, lambda: 1000.0, lambda: leads[0])
    book.up("10.0.0.1", "env-1", "env")
    leads[0] = False
    book.fell("lost", "10.0.0.2", "proxy-1", ["proxy"], "no sign of life for 8.0 s")
    book.given("10.0.0.4", "spare-3", ["proxy"])
    assert told(path) == [("up", "10.0.0.1")]
    assert book.failures("10.0.0.2") == 1  # it decides by it all the same, if it decides at all
    leads[0] = True
    book.settle()
    book.up("10.0.0.4", "spare-3", "proxy")
    book.close()
    assert told(path) == [("up", "10.0.0.1"), ("lost", "10.0.0.2"), ("given", "10.0.0.4"), ("up", "10.0.0.4")]


def test_whom_a_leader_takes_for_lost_that_is_cut_off_is_nothing_to_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "hosts.jsonl"
    everybody = ("10.0.0.2", "10.0.0.3", "10.0.0.4")

    async def scenario(server: SimulatedServer) -> None:
        first, second = (server.open(name, timeout_s=1.0, session_timeout_s=SESSION_S) for name in ("one", "two"))
        old = await Candidate(first, RUN, "one", session_timeout_s=SESSION_S).lead()
        book = HostBook(path, lambda: asyncio.get_running_loop().time(), old.leads)
        book.fell("lost", "10.0.0.2", "env-1", ["env"], "its process has ended")
        standing = asyncio.create_task(Candidate(second, RUN, "two", session_timeout_s=SESSION_S).lead())
        await asyncio.sleep(1.0)
        first.cut()
        while old.leads():  # noqa: ASYNC110  (its lease ends by the clock)
            await asyncio.sleep(0.01)
        assert not standing.done()
        missed(book, everybody)  # nobody leads
        new = await standing
        missed(book, everybody)  # somebody else leads, and has not taken the file over yet
        seize(path)
        following = HostBook(path, lambda: asyncio.get_running_loop().time(), new.leads)
        missed(book, everybody)
        assert [following.failures(host) for host in everybody] == [1, 0, 0]
        first.mend()
        await asyncio.sleep(2 * SESSION_S)
        book.settle()
        book.close()
        following.up("10.0.0.5", "spare-3", "env")
        following.close()
        assert told(path) == [("lost", "10.0.0.2"), ("up", "10.0.0.5")]
        await new.resign()

    async def main() -> None:
        server = SimulatedServer(0)
        try:
            await scenario(server)
        finally:
            server.close()

    run(main())


def missed(book: HostBook, hosts: tuple[str, ...]) -> None:
    """What a node makes of it that hears of nobody."""
    for host in hosts:
        book.fell("lost", host, f"env-{host[-1]}", ["env"], "no sign of life for 8.0 s")
