"""Lightweight actors over the bus, and the ones that make up an agentic reinforcement-learning run."""

from actors.core import Actor, Node, Ref, handler

__all__ = ["Actor", "Node", "Ref", "handler"]
