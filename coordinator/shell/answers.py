"""What the shell's own commands answer where no part of the run does it in that form: parts of a larger answer, and
what lies in run directories."""

from __future__ import annotations

import msgspec

from actors.core.dead_letters import DeadLetter
from actors.core.metrics import ActorDescription


class ActorRow(msgspec.Struct, frozen=True):
    node: str
    actor: str
    facts: ActorDescription


class Actors(msgspec.Struct, frozen=True):
    actors: list[ActorRow]
    silent: dict[str, str]  # nodes that did not answer, and how
    counters: dict[str, dict[str, int]]  # of each node and its connections
    dead_letters: dict[str, list[DeadLetter]]  # the newest of each node


class JobRow(msgspec.Struct, frozen=True):
    """One run directory."""

    run: str
    state: str  # "running", "ended", "killed", or who else owns it
    step: int | None  # the last one on record
    success: float | None
    address: str  # "" unless it runs


class Jobs(msgspec.Struct, frozen=True):
    jobs: list[JobRow]


class Help(msgspec.Struct, frozen=True):
    usage: str
    purpose: str
    more: str = ""
    danger: str = ""


class Helps(msgspec.Struct, frozen=True):
    commands: list[Help]
