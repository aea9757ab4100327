"""Monitors and links: every end is told once, wherever it happens, and no watch is left over."""

import asyncio
from collections.abc import Callable

import pytest

import actors.core.liveness
import bus.asking
from actors.core import Actor, Down, Node, Ref, handler
from bus.message import NodeAddress, NoSuchActor
from tests.actors.support import WHERE, Add, Example, Fail, Mark, Stage, Total, Where, stage, until

both = pytest.mark.parametrize("where", WHERE)


class Watcher(Actor):
    """Keeps what it is told."""

    def __init__(self, on_start: Callable[["Watcher"], object] = lambda watcher: None) -> None:
        self.told: list[Down | Mark] = []
        self._begin = on_start
        self.stopped = False

    async def on_start(self) -> None:
        self._begin(self)

    async def on_stop(self) -> None:
        self.stopped = True

    @handler
    async def mark(self, message: Mark) -> None:
        self.told.append(message)

    @handler
    async def fail(self, message: Fail) -> None:
        raise ValueError(message.text)

    @handler
    async def down(self, message: Down) -> None:
        self.told.append(message)


class Failing(Actor):
    """Says something, then fails."""

    def __init__(self, to: Ref) -> None:
        self.to = to

    @handler
    async def fail(self, message: Fail) -> None:
        self.node.tell(self.to, Mark("before"))
        raise ValueError(message.text)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed soon."""
    monkeypatch.setattr(actors.core.liveness, "PING_EVERY_S", 0.02)
    monkeypatch.setattr(actors.core.liveness, "SILENCE_S", 0.2)
    monkeypatch.setattr(bus.asking, "RESEND_AFTER_S", 0.05)


async def watcher_of(on: Stage, ref: Ref | None = None) -> Watcher:
    """Its monitor is in place."""
    watcher = Watcher(lambda it: it.monitor(ref or on.ref))
    await on.asker.spawn(lambda: watcher, "watcher")
    if on.asker is not on.host:
        await until(lambda: len(on.host.watches) == 1 or bool(watcher.told))
    return watcher


async def told(watcher: Watcher, count: int = 1) -> list[Down | Mark]:
    """Once it is that much, and no more for a while."""
    await until(lambda: len(watcher.told) >= count)
    await asyncio.sleep(0.05)
    return watcher.told


def unwatched(*nodes: Node) -> bool:
    return all(len(node.watches) == 0 and not node._liveness._held for node in nodes)


# ---- monitors --------------------------------------------------------------------------------------------------------


@both
async def test_a_monitor_is_told_once_of_a_stop(where: Where) -> None:
    async with stage(where) as on:
        watcher = await watcher_of(on)
        await on.host.stop(on.ref)
        assert await told(watcher) == [Down(on.ref, "stopped", "it was stopped")]
        await until(lambda: unwatched(on.asker, on.host))


@both
async def test_a_monitor_is_told_of_a_failure_for_good_after_what_the_actor_had_sent(where: Where) -> None:
    async with stage(where) as on:
        watcher = Watcher()
        sink = await on.asker.spawn(lambda: watcher, "watcher")
        failing = await on.host.spawn(lambda: Failing(sink), "failing", restarts=1)
        watcher.monitor(failing)
        if where == "remote":
            await until(lambda: len(on.host.watches) == 1)
        on.asker.tell(failing, Fail("once"))
        await until(lambda: len(watcher.told) == 1)  # a restart in place is nobody's business
        on.asker.tell(failing, Fail("twice"))
        down = Down(failing, "failed", "it failed too often, last with ValueError('twice')")
        assert await told(watcher, 3) == [Mark("before"), Mark("before"), down]


@both
async def test_a_monitor_of_an_actor_that_is_not_there_is_told_so(where: Where) -> None:
    async with stage(where) as on:
        nobody = Ref(on.ref.node, "nobody")
        watcher = await watcher_of(on, nobody)
        (down,) = await told(watcher)
        assert isinstance(down, Down)
        assert (down.ref, down.kind) == (nobody, "no_such_actor")
        assert "there is no actor 'nobody' on node host" in down.reason
        assert unwatched(on.asker, on.host)


@both
async def test_a_cancelled_monitor_is_told_nothing_and_leaves_nothing(where: Where) -> None:
    async with stage(where) as on:
        watcher = await watcher_of(on)
        early, late = watcher.monitor(on.ref), watcher.monitor(on.ref)
        early.cancel()  # before the other node has heard of it
        if where == "remote":
            await until(lambda: len(on.host.watches) == 2)
        late.cancel()
        await until(lambda: len(on.host.watches) == (2 if where == "local" else 1) - (where == "local"))
        await on.host.stop(on.ref)
        assert len(await told(watcher)) == 1
        await until(lambda: unwatched(on.asker, on.host))


@both
async def test_monitors_end_with_their_actor_and_its_restart(where: Where) -> None:
    async with stage(where) as on:
        made: list[Watcher] = []

        def factory() -> Watcher:
            made.append(Watcher(lambda it: it.monitor(on.ref)))
            return made[-1]

        watcher = await on.asker.spawn(factory, "watcher")
        on.asker.tell(watcher, Fail())
        await until(lambda: len(made) == 2 and len(on.host.watches) == 1)
        await on.asker.stop(watcher)
        await until(lambda: unwatched(on.asker, on.host))
        assert await on.add(1) == 1


@both
async def test_a_full_mailbox_does_not_keep_a_down_away(where: Where) -> None:
    async with stage(where) as on:
        release = asyncio.Event()

        class Busy(Watcher):
            @handler
            async def add(self, message: Add) -> Total:
                await release.wait()
                return Total(0)

        watcher = Busy()
        ref = await on.asker.spawn(lambda: watcher, "busy", bound=1)
        watcher.monitor(on.ref)
        waiting = asyncio.create_task(on.asker.ask(ref, Add(1), Total, timeout_s=10))
        await asyncio.sleep(0.01)
        on.asker.tell(ref, Mark("fills it"))
        await on.host.stop(on.ref)
        await asyncio.sleep(0.05)
        release.set()
        await waiting
        assert [type(message) for message in await told(watcher, 2)] == [Mark, Down]


async def test_an_actor_without_a_handler_for_down_cannot_monitor() -> None:
    async with stage("local") as on:
        with pytest.raises(TypeError, match="Example monitors example@host and needs a handler for Down"):
            on.actor.monitor(on.ref)


@both
async def test_a_program_that_is_no_actor_monitors_by_a_function(where: Where) -> None:
    async with stage(where) as on:
        downs: list[Down] = []
        on.asker.monitor(on.ref, downs.append)
        await on.add(1)
        await on.host.stop(on.ref)
        await until(lambda: bool(downs))
        assert [down.kind for down in downs] == ["stopped"]


# ---- nodes -----------------------------------------------------------------------------------------------------------


async def test_a_node_that_closes_says_how_its_actors_ended() -> None:
    async with stage("remote") as on:
        watcher = await watcher_of(on)
        await on.host.close()
        (down,) = await told(watcher)
        assert isinstance(down, Down)
        assert down.kind == "stopped"
        assert unwatched(on.asker)


@pytest.mark.usefixtures("quick")
async def test_a_node_that_falls_silent_takes_its_actors_along() -> None:
    async with stage("remote") as on:
        watcher = await watcher_of(on)
        on.host._transport.close()  # as if its cable were cut
        (down,) = await told(watcher)
        assert isinstance(down, Down)
        assert down.kind == "node_lost"
        assert "node host is lost: no sign of life for 0.2" in down.reason
        assert unwatched(on.asker)


async def test_a_lost_node_takes_its_actors_along_however_it_was_lost() -> None:
    async with stage("remote") as on:
        watcher = await watcher_of(on)
        on.asker.lose(on.host.address, "its process ended")
        (down,) = await told(watcher)
        assert isinstance(down, Down)
        assert (down.kind, down.reason) == ("node_lost", "node host is lost: its process ended")


async def test_a_node_that_restarts_has_lost_its_actors() -> None:
    async with stage("remote") as on:
        watcher = await watcher_of(on)
        on.host._transport.close()
        async with Node("host") as successor:
            successor._courier.ping(on.asker.address)
            assert await told(watcher) == [Down(on.ref, "node_restarted", "node host restarted")]


async def test_an_actor_of_an_earlier_incarnation_is_down_at_once() -> None:
    async with stage("remote") as on:
        await on.add(1)
        address = on.host.address
        earlier = Ref(NodeAddress("host", address.control, address.bulk, address.epoch - 1), "example")
        (down,) = await told(await watcher_of(on, earlier))
        assert isinstance(down, Down)
        assert down.kind == "node_restarted"


@pytest.mark.usefixtures("quick")
async def test_a_watcher_whose_node_falls_silent_is_forgotten() -> None:
    async with stage("remote") as on:
        await watcher_of(on)
        on.asker._transport.close()
        await until(lambda: unwatched(on.host))


async def test_a_ref_with_any_epoch_is_monitored_at_the_incarnation_that_answers() -> None:
    async with stage("remote") as on:
        anyone = Ref(NodeAddress("host", on.host.address.control, "", 0), "example")
        watcher = await watcher_of(on, anyone)
        await until(lambda: bool(on.asker._liveness._held))
        on.asker.lose(on.host.address, "its process ended")
        (down,) = await told(watcher)
        assert isinstance(down, Down)
        assert (down.ref, down.kind) == (anyone, "node_lost")


# ---- links -----------------------------------------------------------------------------------------------------------


class Bound(Watcher):
    """Linked to another one as it starts."""

    def __init__(self, to: Ref) -> None:
        super().__init__(lambda it: it.link(to))


async def linked(on: Stage) -> tuple[Bound, Ref]:
    actor = Bound(on.ref)
    ref = await on.asker.spawn(lambda: actor, "bound")
    await until(lambda: len(on.asker.watches) + len(on.host.watches) == 4)  # an entry for each direction and side
    return actor, ref


@both
@pytest.mark.parametrize("first", ["linking", "linked"])
async def test_linked_actors_end_together_whichever_ends_first(where: Where, first: str) -> None:
    async with stage(where) as on:
        actor, ref = await linked(on)
        watcher = Watcher(lambda it: (it.monitor(ref), it.monitor(on.ref)))
        await on.host.spawn(lambda: watcher, "watcher")
        await until(lambda: len(on.asker.watches) + len(on.host.watches) >= 7)  # both nodes have heard of everything
        if first == "linking":
            await on.asker.stop(ref)
        else:
            await on.host.stop(on.ref)
        downs = [down for down in await told(watcher, 2) if isinstance(down, Down)]
        kinds = {down.ref.actor: down.kind for down in downs}
        assert kinds == (
            {"bound": "stopped", "example": "linked"}
            if first == "linking"
            else {"bound": "linked", "example": "stopped"}
        )
        assert actor.stopped
        assert on.actor.stopped
        await until(lambda: unwatched(on.asker, on.host))


@both
async def test_a_link_that_is_undone_leaves_both_alone(where: Where) -> None:
    async with stage(where) as on:
        actor, ref = await linked(on)
        actor.link(on.ref).cancel()
        await until(lambda: unwatched(on.asker, on.host))
        await on.asker.stop(ref)
        assert await on.add(1) == 1


@both
async def test_a_link_outlasts_a_restart_in_place(where: Where) -> None:
    async with stage(where) as on:
        made: list[Bound] = []

        def factory() -> Bound:
            made.append(Bound(on.ref))
            return made[-1]

        ref = await on.asker.spawn(factory, "bound")
        on.asker.tell(ref, Fail())
        await until(lambda: len(made) == 2)
        await on.host.stop(on.ref)
        await until(lambda: made[1].stopped)
        assert unwatched(on.asker, on.host)


@both
async def test_linking_to_an_actor_that_is_not_there_ends_the_linking_one(where: Where) -> None:
    async with stage(where) as on:
        actor = Bound(Ref(on.ref.node, "nobody"))
        ref = await on.asker.spawn(lambda: actor, "bound")
        await until(lambda: actor.stopped)
        with pytest.raises(NoSuchActor):
            await on.asker.ask(ref, Add(1), Total, timeout_s=10)


async def test_a_linked_actor_ends_with_the_other_ones_node() -> None:
    async with stage("remote") as on:
        actor, _ = await linked(on)
        on.asker.lose(on.host.address, "its process ended")
        await until(lambda: actor.stopped)


async def test_names_with_an_at_sign_are_the_nodes_own() -> None:
    async with Node("n") as node:
        with pytest.raises(ValueError, match="names with @ are the node's own"):
            await node.spawn(Example, "@mine")
