"""What a led run fails for when a node has fallen silent and messages to it fail first; in virtual time."""

from __future__ import annotations

import asyncio
import io

from bus.message import BusError, DeadlineExceeded, Failure, RemoteError
from bus.virtual_time import run
from coordinator.fate import Fate
from coordinator.interruption import Interruption
from coordinator.leadership import SOLE
from coordinator.losses import NodeLost
from coordinator.observe.progress import PlainProgress

LATE = DeadlineExceeded("train waited 10 s for proxy")


def outcome(error: BusError, *, verdict_after_s: float) -> tuple[str, float]:
    """What is said, and after how long; somebody is found to be lost after so long."""

    async def main() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        fate = Fate(Interruption(PlainProgress(1, io.StringIO())), SOLE, verdict_s=20.0)
        loop.call_later(verdict_after_s, fate.fail, NodeLost("proxy", "proxy-1", "node proxy-1 (proxy) is lost"))
        said = await fate.outcome(error)
        return said, loop.time()

    return run(main())


def test_an_unanswered_message_waits_for_the_word_of_who_is_lost() -> None:
    assert outcome(LATE, verdict_after_s=9.0) == ("failed: node proxy-1 (proxy) is lost", 9.0)


def test_where_nobody_is_found_to_be_lost_the_message_is_what_it_failed_for() -> None:
    assert outcome(LATE, verdict_after_s=30.0) == ("failed: train waited 10 s for proxy", 20.0)


def test_an_error_that_was_answered_is_not_held_back_for_long() -> None:
    error = RemoteError("Train to trainer@trainer-0", Failure("NotFinite", "the loss is nan"))
    assert outcome(error, verdict_after_s=9.0) == (
        "failed: Train to trainer@trainer-0: NotFinite: the loss is nan",
        2.0,
    )
