"""What is kept of sessions that have ended, and that none begins when all are to end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from actors.env.agents.asked import Refused
from actors.env.agents.conversation import Renderer
from actors.env.agents.guests import Guests
from actors.env.agents.play import Sessions
from actors.env.agents.session import Rules, Session
from actors.env.episode import Episode
from actors.env.messages import Ticket
from actors.env.tokenizers import ByteTokenizer
from actors.proxy.engines.protocol import Completion
from actors.settings import AgentSettings
from tests.support.loops import run

RULES = Rules(model="tiny", temperature=1.0, max_turns=1, max_tokens=1, max_model_len=8, vocabulary=264)
RENDERER = Renderer(ByteTokenizer(), "line")


def unasked(episode: Episode) -> Session:
    """A session of which nothing is asked."""

    async def generate(*arguments: Any, **wanted: Any) -> Completion:
        raise AssertionError("nothing is asked")

    return Session(
        episode, RENDERER, RULES, generate=generate, check=lambda episode: None, urgent=False, counters=Counter()
    )


def test_of_a_session_that_has_ended_only_how_is_kept() -> None:
    async def test() -> None:
        sessions = Sessions(AgentSettings(), RULES, RENDERER)
        key, opened = sessions.open(lambda: unasked(Episode(Ticket("t1", 1, 2, "train", 1.0, 100), 0.0)))
        kept = weakref.ref(opened)
        sessions.close(key, "its agent has returned")
        del opened
        gc.collect()
        assert kept() is None
        with pytest.raises(Refused, match="the session of trajectory t1, turn 0 has ended: its agent has") as caught:
            sessions.of(key)
        assert (caught.value.status, caught.value.code) == (410, "session_ended")

    run(test())


def test_no_guest_comes_in_while_the_endpoint_closes(tmp_path: Path) -> None:
    async def test() -> None:
        ended = list[str]()
        guests = Guests(
            AgentSettings(guests=2),
            temperature=1.0,
            make=unasked,
            ended=ended.append,
            records=tmp_path / "guests.log",
            counters=Counter(),
        )
        guests.session("ann")
        stopping = asyncio.create_task(guests.stop())
        await asyncio.sleep(0)
        for name, status, code in (("ann", 410, "session_ended"), ("bob", 503, "closing")):
            with pytest.raises(Refused) as caught:
                guests.session(name)
            assert (caught.value.status, caught.value.code) == (status, code)
        await stopping
        assert ended == ["guest0-ann"]

    run(test())
