"""Timers go by the event loop's clock, end with their actor, and never bury a slow one."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

import bus.virtual_time
from actors.core import Actor, Node, handler
from bus.simulated import SimulatedNetwork
from tests.actors.support import Add, Fail


class Tick(msgspec.Struct, frozen=True):
    name: str = ""
    takes_s: float = 0.0


class Clocked(Actor):
    """Notes when it is told what."""

    def __init__(self, begin: Callable[["Clocked"], object], start: float = 0.0) -> None:
        self.begin = begin
        self.start = start
        self.heard: list[tuple[str, float]] = []

    async def on_start(self) -> None:
        self.begin(self)

    @handler
    async def tick(self, message: Tick) -> None:
        self.heard.append((message.name, round(self.node.loop.time() - self.start, 6)))
        await asyncio.sleep(message.takes_s)

    @handler
    async def fail(self, message: Fail) -> None:
        raise ValueError("on purpose")


def heard(
    begin: Callable[[Clocked], object], seconds: float, *, fail_at: float | None = None
) -> list[tuple[str, float]]:
    """What an actor that begins like that has heard after some virtual time, over its restarts."""
    made: list[Clocked] = []

    def factory() -> Clocked:
        made.append(Clocked(begin, made[0].start if made else asyncio.get_running_loop().time()))
        return made[-1]

    async def main() -> None:
        async with Node("n", transport=SimulatedNetwork(seed=1).join("n")) as node:
            ref = await node.spawn(factory, "clocked")
            if fail_at is not None:
                await asyncio.sleep(fail_at)
                node.tell(ref, Fail())
                await asyncio.sleep(seconds - fail_at)
            else:
                await asyncio.sleep(seconds)
            await node.stop(ref)
            before = [len(one.heard) for one in made]
            await asyncio.sleep(100)
            assert [len(one.heard) for one in made] == before

    bus.virtual_time.run(main())
    return [entry for one in made for entry in one.heard]


def test_a_message_comes_after_its_delay() -> None:
    def begin(actor: Clocked) -> None:
        actor.send_after(2.0, Tick("later"))
        actor.send_after(0.5, Tick("soon"))

    assert heard(begin, 5) == [("soon", 0.5), ("later", 2.0)]


def test_a_message_comes_every_interval_first_after_one() -> None:
    assert heard(lambda actor: actor.every(1.5, Tick()), 5) == [("", 1.5), ("", 3.0), ("", 4.5)]


def test_ticks_that_come_while_the_last_one_is_handled_are_left_out() -> None:
    found = heard(lambda actor: actor.every(1.0, Tick(takes_s=2.5)), 9.25)
    assert [when for _, when in found] == [1.0, 4.0, 7.0]


def test_cancelled_timers_send_nothing() -> None:
    def begin(actor: Clocked) -> None:
        actor.every(1.0, Tick("cancelled")).cancel()
        once = actor.send_after(1.0, Tick("cancelled"))
        once.cancel()
        once.cancel()
        actor.send_after(1.0, Tick("kept"))

    assert heard(begin, 5) == [("kept", 1.0)]


def test_timers_end_with_a_restart_and_the_fresh_actor_sets_its_own() -> None:
    assert heard(lambda actor: actor.every(1.0, Tick()), 4.25, fail_at=1.5) == [("", 1.0), ("", 2.5), ("", 3.5)]


async def test_a_timer_for_what_the_actor_does_not_handle_is_refused_at_once() -> None:
    async with Node("n") as node:
        with pytest.raises(Exception, match="clocked@n does not handle Add"):
            await node.spawn(lambda: Clocked(lambda actor: actor.send_after(1.0, Add(1))), "clocked")
        with pytest.raises(ValueError, match="expected a time above 0"):
            await node.spawn(lambda: Clocked(lambda actor: actor.every(0.0, Tick())), "clocked")
