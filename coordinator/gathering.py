"""A led run to its end, over the loss of nodes and hosts: it gathers again, and goes back to its newest checkpoint.

    sitting --a role or its node is lost--> checkpoint (where the trainer lives) --> next epoch --> who follows?
       ^                                                                                             |
       +-- everybody begins again, spares in place of who is gone <----- muster ---------------------+
                                                                    no holder for a role --> the end

A leader that takes over a run of which something went with the one before begins in the middle of this picture.

Everything is started anew, as by ``--resume``: a host that is lost may hold the trainer, and to roll back versions that
engines serve and trajectories carry would be a second way for weights to arrive. The control processes stay, with what
they have loaded; so does a trainer on a node of its own which holds just what the checkpoint has. A role that fails
on a host that lives is started again there: at most ``MOST`` times without a newer checkpoint, and not on a host in
quarantine.

Invariant: whoever was told to begin again under an epoch does so under that epoch's leader; what cannot go on ends by
name, and can be resumed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from actors.core import Node, Ref
from actors.trainer.messages import DescribeTrainer, Discard, Discarded, TrainerState
from bus.message import BusError, CannotListen
from coordinator.checkpoints import Checkpoints
from coordinator.facts import Facts
from coordinator.hostbook import HostBook
from coordinator.interruption import Interruption
from coordinator.launch import CONTROL, Launch, open_node
from coordinator.losses import NodeLost, RoleLost
from coordinator.messages import MEMBER, BeginAgain, Following, Join, Obeyed, RunOver
from coordinator.metadata.protocol import StoreError
from coordinator.muster import NoHolder, member_of, muster
from coordinator.observe.progress import Progress
from coordinator.observe.rundir import RunDirectory
from coordinator.recovery import MOST, gone_back
from coordinator.run import Run
from coordinator.takeover import Followers, Led, gather_followers

log = logging.getLogger(__name__)

BEGIN_S = 10.0
"""How long a node may take to hear that it begins again."""
BEGIN_RETRIES = 5
PORT_S = 10.0
"""How long the leader's port may still be taken by its own node of before."""
PORT_AGAIN_S = 0.1
CLOSE_S = 5.0


class Gathering:
    """See the module docstring. ``directory`` is owned by this process."""

    def __init__(self, launch: Launch, directory: RunDirectory, progress: Progress, led: Led) -> None:
        self._launch = launch
        self._directory = directory
        self._progress = progress
        self._led = led
        self._facts = Facts(led.store, directory.path.name)
        self._interruption = Interruption(progress)
        self._book = HostBook(directory.hosts, leads=led.term.leads)
        self._fruitless = 0
        self._started_from = self._newest()

    async def run(self) -> int:
        """Exit status: 0 done, 1 failed, 130 interrupted."""
        try:
            return await self._run()
        finally:
            self._book.close()

    async def _run(self) -> int:
        led = self._led
        if led.node is not None and led.followers is not None and self._something_is_missing():
            self._progress.warn("not every role is there: the run goes back to its newest checkpoint")
            if not await self._begin_again(led.node, led.followers.nodes):
                return 1
        while True:
            run = Run(
                self._launch,
                self._directory,
                self._progress,
                interruption=self._interruption,
                led=self._led,
                hosts=self._book,
                again=self._can_begin_again,
            )
            ending = await run.sit()
            if not ending.again:
                return run.say(ending)
            if not await self._gather():
                return run.say(ending)

    # ---- whether -------------------------------------------------------------------------------------------------

    def _something_is_missing(self) -> bool:
        """Of a run that has begun and of which every role can be had; one that has not begun waits for its roles."""
        led = self._led
        if led.journal is None or led.followers is None or led.followers.complete:
            return False
        led.journal.catch_up()
        return led.journal.begun and self._has_holders([each.join for each in led.followers.nodes])

    def _can_begin_again(self, lost: RoleLost, there: list[Join]) -> bool:
        """Asked at the end of a sitting, when what can be saved is saved."""
        newest = self._newest()
        tries = self._fruitless + 1 if newest <= self._started_from else 1
        if tries > MOST:
            log.error("%d recoveries in a row from version %d came to no newer checkpoint", MOST, newest)
            return False
        if not self._has_holders([join for join in there if join.node.name != CONTROL]):
            return False
        self._fruitless, self._started_from = tries, newest
        how = "a node is gone" if isinstance(lost, NodeLost) else "a role has failed"
        self._progress.warn(f"{how}; everybody begins again from version {newest} (recovery {tries} of {MOST})")
        return True

    def _has_holders(self, joins: Sequence[Join]) -> bool:
        """Whether those who are there could have all roles."""
        try:
            muster([member_of(join) for join in joins], self._book.barred(), self._launch.job)
        except NoHolder as error:
            log.error("%s", error)
            return False
        return True

    def _newest(self) -> int:
        versions = Checkpoints(self._directory.checkpoints, self._launch.job.checkpoint.keep).versions()
        return versions[-1] if versions else 0

    # ---- how -----------------------------------------------------------------------------------------------------

    async def _gather(self) -> bool:
        """Lead on under the next epoch, with whoever follows. Whether everybody begins again."""
        epoch = await self._led.term.raise_epoch()
        node = await self._open_node(epoch)
        followers = await gather_followers(node, self._facts, Ref(node.address, "coordinator"), anew=True)
        return await self._begin_again(node, followers.nodes)

    async def _begin_again(self, node: Node, nodes: list[Following]) -> bool:
        """Give everybody their roles, and go back to the checkpoint. False, and the end, where somebody is missing."""
        members = [member_of(each.join) for each in nodes]
        try:
            roles = muster(members, self._book.barred(), self._launch.job)
        except NoHolder as error:
            log.error("%s", error)
            await self._give_up(node, nodes)
            return False
        for member in members:
            more = [role for role in roles[member.node] if role not in member.roles]
            if more:
                self._progress.note(f"{member.node} takes {', '.join(more)}")
                self._book.given(member.host, member.node, more)
        leader = Ref(node.address, "coordinator")
        self._launch = gone_back(self._launch, self._directory)
        trainer = next((each for each in nodes if roles[each.join.node.name] == each.join.roles == ["trainer"]), None)
        stays = trainer is not None and await self._is_at_the_checkpoint(node, trainer)
        orders = [
            (each.join, BeginAgain(leader, roles[each.join.node.name]))
            for each in nodes
            if not (stays and each is trainer)
        ]
        await asyncio.gather(*(self._tell(node, join, order) for join, order in orders))
        kept = None
        if stays and trainer is not None and await self._forgets_the_rest(node, trainer):
            kept = Followers([trainer])
            self._progress.note(f"{trainer.join.node.name} goes on as it is")
        elif stays and trainer is not None:
            await self._tell(node, trainer.join, BeginAgain(leader, ["trainer"]))
        told = [
            msgspec.structs.replace(each.join, roles=roles[each.join.node.name])
            for each in nodes
            if kept is None or each is not trainer
        ]
        led = self._led
        self._led = Led(led.store, led.term, shards=led.shards, node=node, kept=kept, told=told)
        return True

    async def _is_at_the_checkpoint(self, node: Node, trainer: Following) -> bool:
        """Whether a trainer on a node of its own holds what the checkpoint has, so that it need not load it."""
        state = await self._state_of(node, trainer)
        resume = self._launch.resume
        if state is None or not state.lives:
            return False
        if resume is None or state.weights is None or state.stepping is not None:
            return False
        held = {each.ticket for each in state.kept}
        return state.weights.manifest.version == resume.version and self._buffered() <= held

    async def _forgets_the_rest(self, node: Node, trainer: Following) -> bool:
        """Drop what it was given since the checkpoint. To be called once nobody gives it anything any more."""
        state = await self._state_of(node, trainer)
        if state is None or not state.lives:
            return False
        rest = [each.ticket for each in state.kept if each.ticket not in self._buffered()]
        try:
            await node.ask(trainer.announced[0].ref, Discard(rest), Discarded, timeout_s=BEGIN_S, about="the trainer")
        except BusError as error:
            log.warning("%s", error)
            return False
        return True

    def _buffered(self) -> set[str]:
        """Tickets in the checkpoint's buffer."""
        resume = self._launch.resume
        return set() if resume is None else {each for group in resume.scheduler.groups for each in group.stored}

    async def _state_of(self, node: Node, trainer: Following) -> TrainerState | None:
        if not trainer.announced:
            return None
        try:
            return await node.ask(
                trainer.announced[0].ref, DescribeTrainer(), TrainerState, timeout_s=BEGIN_S, about="the trainer"
            )
        except BusError as error:
            log.warning("%s", error)
            return None

    async def _tell(self, node: Node, join: Join, order: BeginAgain) -> None:
        try:
            about = f"node {join.node.name} begins again"
            await node.ask(Ref(join.node, MEMBER), order, Obeyed, timeout_s=BEGIN_S, retries=BEGIN_RETRIES, about=about)
        except BusError as error:  # it will not join, and be missed
            log.warning("%s", error)

    async def _give_up(self, node: Node, nodes: list[Following]) -> None:
        for each in nodes:
            node.tell(Ref(each.join.node, MEMBER), RunOver("the run has ended"))
        await node.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._facts.status("failed", self._started_from)
                await self._led.term.resign()
                await self._facts.close()
        except (StoreError, TimeoutError) as error:
            log.warning("the metadata store was not told that the run has ended: %s", error)

    async def _open_node(self, epoch: int) -> Node:
        """At the port of the one before, where the job names it. Raises ``CannotListen``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PORT_S
        while True:
            try:
                return open_node(self._launch, epoch)
            except CannotListen:
                if loop.time() > until:
                    raise
                await asyncio.sleep(PORT_AGAIN_S)
