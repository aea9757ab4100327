"""Imitation of demonstrations (``bin/sft``): which ones, in which order, and the loop over them.

    demonstrations -> held out | trained on -> batches, another order every epoch -> Imitate -> model directory

Invariant: which demonstrations a step sees depends on the data, the settings and the seed alone, so that a resumed run
goes on as the unbroken one; what is held out is never trained on, and a group of trajectories (one task) is on one
side.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from actors.env.chats import ChatError, chat_trajectory, read_chats
from actors.env.framing import Framing
from actors.settings import SftSettings
from actors.trainer.messages import Imitate, Imitated, LogProbabilities, Saved, ScoreTrajectories, WriteModel
from actors.trajectory import Trajectory
from coordinator.dumping import fitting_dump
from coordinator.job import Job, JobError
from coordinator.modeldir import finish_model
from coordinator.observe.records import ImitationRecord
from coordinator.offline import OfflineRun, Stopped
from coordinator.pipeline import SAVE_TIMEOUT_S
from coordinator.resources.resolve import policy_facts


class Demonstrations(msgspec.Struct, frozen=True):
    """What is imitated."""

    source: str  # in words
    train: list[Trajectory]
    held_out: list[Trajectory]

    def describe(self) -> str:
        tokens = sum(trajectory.sampled_tokens for trajectory in self.train)
        return f"{self.source}: {len(self.train)} to imitate ({tokens} tokens), {len(self.held_out)} held out"


def load_demonstrations(path: Path, job: Job, framing: Framing) -> Demonstrations:
    """From a dump, a run that has recorded, or chats. Raises ``JobError``."""
    settings = job.sft
    if path.is_dir():
        found = fitting_dump(path, job).trajectories
        chosen = select(found, settings)
        source = f"{len(chosen)} of {len(found)} recorded trajectories"
    else:
        chosen = _from_chats(path, job, framing)
        source = f"{len(chosen)} chats"
    train, held_out = split(chosen, settings.held_out, job.seed)
    return Demonstrations(source, train, held_out)


def _from_chats(path: Path, job: Job, framing: Framing) -> list[Trajectory]:
    if job.sft.select != "all" or job.sft.top_return != 1.0:
        raise JobError("sft.select, sft.top_return: chats have no success and no return; select recorded ones only")
    limit, result = policy_facts(job).max_positions, []
    try:
        for index, chat in enumerate(read_chats(path)):
            trajectory = chat_trajectory(chat, index, framing, job.rollout.max_tokens_per_turn)
            length = len(trajectory.segments[0].tokens)
            if length > limit:
                raise ChatError(f"chat {index + 1} has {length} tokens, the policy {limit} positions")
            result.append(trajectory)
    except (ChatError, ValueError) as error:
        raise JobError(f"sft.data: {error}") from None
    return result


def select(trajectories: Sequence[Trajectory], settings: SftSettings) -> list[Trajectory]:
    """Those worth imitating: successful ones, if asked for, and of these the share with the highest return (of equal
    ones the earlier). Their order is kept. Raises ``JobError`` where none is left."""
    wanted = [trajectory for trajectory in trajectories if settings.select == "all" or trajectory.success]
    if not wanted:
        raise JobError(f"sft.select: none of the {len(trajectories)} recorded trajectories was a success")
    count = math.ceil(settings.top_return * len(wanted))
    best = sorted(range(len(wanted)), key=lambda index: (-wanted[index].env_return, index))[:count]
    return [wanted[index] for index in sorted(best)]


def split(trajectories: Sequence[Trajectory], share: float, seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """(trained on, held out): whole groups are held out at random until there are ``share`` of the trajectories; at
    least one group is trained on."""
    sizes = Counter(trajectory.group for trajectory in trajectories)
    groups = list(sizes)
    wanted, held, count = round(share * len(trajectories)), set[int](), 0
    if share and len(groups) > 1:
        wanted = max(wanted, 1)
    for index in np.random.default_rng([seed, 0]).permutation(len(groups))[:-1]:
        if count >= wanted:
            break
        held.add(groups[index])
        count += sizes[groups[index]]
    train = [trajectory for trajectory in trajectories if trajectory.group not in held]
    return train, [trajectory for trajectory in trajectories if trajectory.group in held]


def batch_of(version: int, count: int, settings: SftSettings, seed: int) -> tuple[int, list[int]]:
    """(epoch, indices) of the step from ``version`` on: every epoch is another permutation of ``count``."""
    each = steps_of_an_epoch(count, settings)
    epoch, step = divmod(version, each)
    order = np.random.default_rng([seed, 1, epoch]).permutation(count)
    return epoch + 1, order[step * settings.batch_size : (step + 1) * settings.batch_size].tolist()


def steps_of_an_epoch(count: int, settings: SftSettings) -> int:
    return -(-count // settings.batch_size)


class Imitation:
    """The program of an offline run."""

    def __init__(self, demonstrations: Demonstrations, model: Path, policy_directory: Path) -> None:
        """``model``: where the weights go in the end, as a directory that ``policy.path`` takes."""
        self._data = demonstrations
        self._model = model
        self._policy_directory = policy_directory

    def steps(self, settings: SftSettings) -> int:
        return settings.epochs * steps_of_an_epoch(len(self._data.train), settings)

    async def __call__(self, run: OfflineRun) -> str:
        settings, version = run.job.sft, run.version
        total = self.steps(settings)
        try:
            if version == 0:
                await self._measure_first(run, total)
            while version < total:
                version = await self._step(run, version, total)
        except Stopped:
            await self._write(run)
            raise
        await self._write(run)
        return f"all {total} steps are done"

    async def _step(self, run: OfflineRun, version: int, total: int) -> int:
        settings, start = run.job.sft, time.monotonic()
        epoch, indices = batch_of(version, len(self._data.train), settings, run.job.seed)
        rate = settings.learning_rate * min(1.0, (version + 1) / max(settings.warmup_steps, 1))
        batch = [self._data.train[index] for index in indices]
        order = Imitate(version, batch, rate)
        about = f"version {version + 1}"
        done = await run.ask(order, Imitated, timeout_s=run.step_timeout_s(), about=about)
        seconds, statistics = time.monotonic() - start, done.statistics
        version += 1
        due = version == total or (settings.evaluate_every and version % settings.evaluate_every == 0)
        tokens = int(statistics["tokens"])
        run.version = version  # what is measured now belongs to it, however the measurement ends
        record = ImitationRecord(
            step=version,
            version=version,
            epoch=epoch,
            elapsed_s=run.recorder.elapsed_s,
            loss=statistics["loss"],
            held_out_loss=await self._held_out_loss(run) if due else math.nan,
            grad_norm=statistics["grad_norm"],
            entropy=statistics["entropy"],
            learning_rate=rate,
            demonstrations=len(batch),
            tokens=tokens,
            tokens_per_s=tokens / max(seconds, 1e-9),
        )
        run.recorder.imitation(record, total)
        await run.stepped(version)
        return version

    async def _measure_first(self, run: OfflineRun, total: int) -> None:
        """What the policy makes of the held-out demonstrations before it has seen any."""
        if not self._data.held_out:
            return
        nan = math.nan
        record = ImitationRecord(
            step=0,
            version=0,
            epoch=0,
            elapsed_s=run.recorder.elapsed_s,
            loss=nan,
            held_out_loss=await self._held_out_loss(run),
            grad_norm=nan,
            entropy=nan,
            learning_rate=0.0,
            demonstrations=0,
            tokens=0,
            tokens_per_s=0.0,
        )
        run.recorder.imitation(record, total)

    async def _held_out_loss(self, run: OfflineRun) -> float:
        """Nats a token."""
        held_out = self._data.held_out
        if not held_out:
            return math.nan
        order = ScoreTrajectories(held_out)
        scored = await run.ask(order, LogProbabilities, timeout_s=run.step_timeout_s(), about="held-out loss")
        total = sum(float(np.asarray(segment, np.float64).sum()) for segment in scored.segments)
        return -total / sum(trajectory.sampled_tokens for trajectory in held_out)

    async def _write(self, run: OfflineRun) -> None:
        self._model.mkdir(parents=True, exist_ok=True)
        await run.ask(WriteModel(str(self._model)), Saved, timeout_s=SAVE_TIMEOUT_S, about="model")
        finish_model(self._model, self._policy_directory, run.job.policy)
        run.progress.note(f"model written to {self._model}")
