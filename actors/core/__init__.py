"""Actors, references, supervision, and the node that runs them."""

from actors.core.actor import Actor, handler
from actors.core.directory import Directory, LocalDirectory
from actors.core.names import Named
from actors.core.node import Node
from actors.core.ref import Ref
from actors.core.restarts import Restarts
from actors.core.supervisor import ALL_FOR_ONE, ONE_FOR_ONE, Supervised, Supervisor
from actors.core.typed import Message
from actors.core.watching import Down

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
