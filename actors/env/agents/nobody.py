"""The agent of a run whose sessions are all guests' (``bin/serve``): no ticket is ever given to it."""

from __future__ import annotations

from actors.env.agents.protocol import Result, Session


def nobody(session: Session) -> Result:
    return Result(0.0)
