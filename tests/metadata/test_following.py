from __future__ import annotations

import asyncio

from coordinator.metadata.following import Follower, Mark, ReadAgain
from coordinator.metadata.watching import ChangeQueue
from tests.metadata.backends import run, take


class Server:
    """What a server would answer; ``failures`` reads lose their connection first."""

    def __init__(self, **entries: Mark) -> None:
        self.entries = entries
        self.failures = 0

    async def names(self, prefix: str) -> list[str]:
        return list(self.entries)

    async def mark(self, path: str) -> Mark | None:
        if self.failures:
            self.failures -= 1
            raise ReadAgain
        return self.entries.get(path.removeprefix("/p/"))


def test_a_read_that_lost_its_connection_is_made_again_for_everything() -> None:
    async def scenario() -> None:
        server = Server(a=Mark(1, 1), b=Mark(2, 2))
        follower, following = started(server)
        await follower.armed.wait()
        server.entries.update(a=Mark(1, 7), b=Mark(2, 6))
        server.failures = 1
        follower.doubt("/p/a")  # the event about b is lost with the connection
        assert await take(follower.watch, 2) == [("written", "/p/b"), ("written", "/p/a")]
        following.cancel()

    run(scenario())


def test_a_watch_whose_first_look_is_interrupted_reports_nothing_of_it() -> None:
    async def scenario() -> None:
        server = Server(a=Mark(1, 1))
        server.failures = 2
        follower, following = started(server)
        await follower.armed.wait()
        server.entries["b"] = Mark(5, 5)
        follower.doubt("/p")
        assert await take(follower.watch, 1) == [("created", "/p/b")]
        following.cancel()

    run(scenario())


def test_an_entry_deleted_and_made_again_between_two_looks_is_reported_as_both() -> None:
    async def scenario() -> None:
        server = Server(a=Mark(1, 1), b=Mark(2, 2))
        follower, following = started(server)
        await follower.armed.wait()
        server.entries = {"a": Mark(8, 9)}
        follower.doubt(None)
        assert await take(follower.watch, 3) == [("deleted", "/p/a"), ("deleted", "/p/b"), ("created", "/p/a")]
        following.cancel()

    run(scenario())


def started(server: Server) -> tuple[Follower, asyncio.Task[None]]:
    follower = Follower("/p", ChangeQueue(on_close=lambda _: None))
    return follower, asyncio.create_task(follower.run(server))
