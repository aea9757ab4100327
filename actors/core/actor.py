"""An actor: state that only its own handlers touch, one message at a time.

    class Counter(Actor):
        def __init__(self) -> None:
            self.total = 0

        @handler
        async def add(self, message: Add) -> Total:
            self.total += message.amount
            return Total(self.total)

A handler takes one message, whose annotated type says which messages reach it. What it returns (or, being an async
generator, yields) answers an ``ask`` (or a ``stream``). Handlers run one after another, in the order of arrival;
``@handler(concurrent=True)`` runs in a task of its own, for work that waits, and ``@handler(urgent=True)`` overtakes
what is queued.

Where an asker stops waiting (its deadline, its cancellation, its end), the handler is cancelled, or never begun: what
it holds it lets go in ``finally``, as in any cancelled coroutine. ``@handler(cancellable=False)`` is for work that must
run to its end once it was asked for, or cannot be stopped anyway (a thread).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import msgspec

from actors.core.typed import check_reply

if TYPE_CHECKING:
    from actors.core.holdings import Holdings, Timer
    from actors.core.node import Node
    from actors.core.ref import Ref
    from actors.core.watching import Monitor

F = TypeVar("F", bound=Callable[..., Any])


class HandlerFacts(msgspec.Struct, frozen=True):
    """What ``@handler`` learned of a method."""

    method: str
    message: Any
    concurrent: bool
    urgent: bool
    cancellable: bool
    streams: bool


@overload
def handler(function: F) -> F: ...
@overload
def handler(*, concurrent: bool = False, urgent: bool = False, cancellable: bool = True) -> Callable[[F], F]: ...
def handler(
    function: F | None = None, *, concurrent: bool = False, urgent: bool = False, cancellable: bool = True
) -> F | Callable[[F], F]:
    """Mark a method as the handler of the message type that it is annotated with."""

    def mark(method: F) -> F:
        method.__handler__ = (concurrent, urgent, cancellable)  # type: ignore[attr-defined]
        return method

    return mark(function) if function is not None else mark


class Actor:
    """Base of all actors. The hooks run in the actor's own context, never at once with a handler that is not
    ``concurrent``."""

    node: Node
    ref: Ref
    _holdings: Holdings
    _facts: ClassVar[dict[str, HandlerFacts] | None] = None

    async def on_start(self) -> None:
        """Before the first message. An exception here fails the spawn, or counts as another failure in a restart;
        ``on_stop`` follows."""

    async def on_stop(self) -> None:
        """After the last message, also before a restart."""

    async def on_failure(self, error: Exception) -> None:
        """A handler of a ``tell`` raised, or a restart failed; a restart, if any is left, follows."""

    def monitor(self, ref: Ref) -> Monitor:
        """Be told by one ``Down`` (for which this actor needs a handler) when an actor, here or on another node, has
        stopped, has failed for good, is not there, or its node dies or restarts. The ``Down`` comes after what the
        actor had sent to this one on the control lane. Ends with this actor, or its restart."""
        return self._holdings.monitor(ref)

    def link(self, ref: Ref) -> Monitor:
        """Bind two actors: whichever ends, for whatever reason, the other one is stopped. Outlasts restarts in place;
        cancelling it undoes it for both. Linking again changes nothing."""
        return self._holdings.link(ref)

    def send_after(self, delay_s: float, message: Any) -> Timer:
        """Send this actor a message once some of the event loop's time has passed. Ends with this actor, or its
        restart."""
        return self._holdings.send_after(delay_s, message)

    def every(self, interval_s: float, message: Any) -> Timer:
        """Send this actor a message again and again, first after one interval; left out while the last one still waits
        or is being handled. Ends with this actor, or its restart."""
        return self._holdings.every(interval_s, message)

    @classmethod
    def handlers(cls) -> dict[str, HandlerFacts]:
        """Message type name to handler; found once per class. Raises ``TypeError`` for a malformed handler."""
        if "_facts" not in cls.__dict__ or cls._facts is None:
            found = [
                _facts_of(cls, name, method)
                for name, method in inspect.getmembers(cls, inspect.isfunction)
                if hasattr(method, "__handler__")
            ]
            cls._facts = {facts.message.__name__: facts for facts in found}
            if len(cls._facts) < len(found):
                raise TypeError(f"{cls.__name__}: two handlers take messages of one name")
        return cls._facts


def _facts_of(cls: type[Actor], name: str, method: Any) -> HandlerFacts:
    concurrent, urgent, cancellable = method.__handler__
    hints = typing.get_type_hints(method)
    parameters = [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
    where = f"{cls.__name__}.{name}"
    if len(parameters) != 1 or parameters[0] not in hints:
        raise TypeError(f"{where}: a handler takes one message with an annotated type")
    message = hints[parameters[0]]
    if not (isinstance(message, type) and issubclass(message, msgspec.Struct)):
        raise TypeError(f"{where}: handles {message}, expected a msgspec.Struct")
    streams = inspect.isasyncgenfunction(method)
    if not streams and not inspect.iscoroutinefunction(method):
        raise TypeError(f"{where}: a handler is 'async def'")
    check_reply(where, message, hints.get("return", Any), streams=streams)
    return HandlerFacts(name, message, concurrent or streams, urgent, cancellable, streams)
