"""Lightweight actors over the bus, and the ones that make up an agentic reinforcement-learning run."""

from actors.core import (
    ALL_FOR_ONE,
    ONE_FOR_ONE,
    Actor,
    Directory,
    Down,
    LocalDirectory,
    Message,
    Named,
    Node,
    Ref,
    Restarts,
    Supervised,
    Supervisor,
    handler,
)

__all__ = [
    "ALL_FOR_ONE",
    "ONE_FOR_ONE",
    "Actor",
    "Directory",
    "Down",
    "LocalDirectory",
    "Message",
    "Named",
    "Node",
    "Ref",
    "Restarts",
    "Supervised",
    "Supervisor",
    "handler",
]
