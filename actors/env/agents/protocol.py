"""What an agent is: any code that asks an OpenAI-compatible endpoint, and says in the end how well it did.

A complete one, to copy and change::

    import openai

    from actors.env.agents.protocol import Session

    def solve(session: Session) -> float:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        question, answer = f"What is {session.task} + 1?", str(session.task + 1)
        reply = client.chat.completions.create(model=session.model, messages=[{"role": "user", "content": question}])
        return float(answer in (reply.choices[0].message.content or ""))

A job names it by import path (``environment.name: my_agent:solve``, with a section ``environment.agent``, which may be
``{}``). A function gets ``environment.options`` as keyword arguments behind the session; a class is made with them, and
its ``run(session)`` is called. It runs in a thread of a worker process, many at once, so it may block but must keep
what belongs to one session to itself; what it raises costs its trajectory.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Session(msgspec.Struct, frozen=True):
    """One run of an agent."""

    task: int
    """A seed: the same task poses the same problem every time (see ``actors.env.protocol``)."""

    base_url: str
    """Of the endpoint: ``http://127.0.0.1:PORT/v1``."""

    api_key: str
    """Of this session: whatever asks with it is recorded as this trajectory."""

    model: str
    """The policy's name; the endpoint takes any."""


class Result(msgspec.Struct, frozen=True):
    """How it went; an agent may return the reward alone."""

    reward: float
    success: bool | None = None  # None: it succeeded if the reward is above 0
    metrics: dict[str, float] = {}  # as those of a ``Step``


Agent = Callable[[Session], "Result | float"]
