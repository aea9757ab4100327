"""Actors, references, supervision, and the node that runs them."""

from actors.core.actor import Actor, handler
from actors.core.node import Node
from actors.core.ref import Ref

__all__ = ["Actor", "Node", "Ref", "handler"]
