"""Messages that say what they are answered with.

    class Add(Message[Total], frozen=True):
        amount: int

    total = await node.ask(counter, Add(2), timeout_s=1.0)   # a Total, for mypy too

Invariant: a handler of such a message is annotated to answer with just that (checked when its class is first used), and
what arrives is decoded as that.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec

R = TypeVar("R")


class Message(msgspec.Struct, Generic[R], frozen=True):
    """Base of messages that are answered with an ``R``, or with a stream of them."""


@functools.cache
def declared_reply(message: type) -> Any:
    """What a message is answered with; None where it does not say (``NoneType`` where it says None)."""
    for kind in message.__mro__:
        for base in kind.__dict__.get("__orig_bases__", ()):
            if get_origin(base) is Message:
                return get_args(base)[0]
    return None


def check_reply(where: str, message: type, annotated: Any, *, streams: bool) -> None:
    """Raises ``TypeError`` where a handler's annotation is another one than its message declares."""
    expected = declared_reply(message)
    if expected is None:
        return
    found = get_args(annotated)[0] if streams and get_args(annotated) else annotated
    if found not in (expected, Any):
        name, what = message.__name__, "items of " if streams else ""
        raise TypeError(f"{where}: answers with {what}{_name(found)}, but {name} is a Message[{_name(expected)}]")


def reply_type(message: type) -> Any:
    """What to decode the answer as. Raises ``TypeError`` where the message does not say."""
    declared = declared_reply(message)
    if declared is None:
        raise TypeError(f"ask with {message.__name__}: name the type of the reply, or derive it from Message[Reply]")
    return declared


def _name(type_: Any) -> str:
    return type_.__name__ if isinstance(type_, type) else str(type_)
