"""From what an engine samples to what the trainer trains on, through the real parts and without any actor."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from actors.env.framing import TextFraming
from actors.env.protocol import Observation
from actors.env.recorder import TrajectoryRecorder, check_trajectory
from actors.env.tokenizers import ByteTokenizer
from actors.env.workbench import Workbench
from actors.policy import Qwen3Shape, write_config
from actors.proxy.engines import EngineKind, make_engine
from actors.proxy.engines.protocol import Engine, GenerateRequest
from actors.settings import EnvironmentSettings, TrainSettings
from actors.trainer.backends import make_backend
from actors.trainer.batching import make_batch
from actors.trainer.store import TrajectoryStore
from actors.trajectory import Trajectory

TEMPERATURE = 0.8
AT_ONCE = 64


class Played:
    """Trajectories, and what the engine said it had sampled for each of them."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self.sampled: dict[str, list[int]] = defaultdict(list)


def play(engine: Engine, bench: Workbench, count: int) -> Played:
    """FrozenLake episodes, ``AT_ONCE`` side by side; groups of four share a number."""
    framing = TextFraming(ByteTokenizer())
    played = Played()
    recorders: dict[str, TrajectoryRecorder] = {}
    started = 0

    def ask(ticket: str, observation: Observation) -> None:
        recorder = recorders[ticket]
        allowed = framing.allowed(observation.actions or ())
        engine.add(
            GenerateRequest(
                f"{ticket}/{recorder.turns}",
                ticket,
                recorder.prompt(),
                max_tokens=1,
                temperature=TEMPERATURE,
                allowed_token_ids=allowed,
                seed=len(recorders) * 100 + recorder.turns,
            )
        )

    while len(played.trajectories) < count:
        while started < count and engine.unfinished() < AT_ONCE:
            ticket = f"t{started}"
            recorders[ticket] = TrajectoryRecorder(ticket, started // 4, started, TEMPERATURE)
            observation = bench.reset(ticket, started)
            recorders[ticket].start(framing.opening("", observation.text), observation.text)
            started += 1
            ask(ticket, observation)
        for completion in engine.step():
            ticket = completion.request_id.partition("/")[0]
            recorder = recorders[ticket]
            played.sampled[ticket] += completion.tokens.tolist()
            action = framing.action(completion.tokens)
            allowed = framing.allowed(("L", "D", "R", "U"))
            recorder.sampled(completion.tokens, completion.logprobs, completion.versions, allowed, action)
            step = bench.step(ticket, action)
            if step.terminated or step.truncated or recorder.turns == 12:
                standing = bench.standing(ticket)
                played.trajectories.append(
                    recorder.finish(env_return=standing.env_return, reward=standing.env_return, success=False)
                )
                bench.close(ticket)
                engine.forget(ticket)
            else:
                last = int(completion.tokens[-1])
                recorder.observed(framing.following(step.observation.text, last), step.observation.text)
                ask(ticket, step.observation)
    return played


@pytest.mark.parametrize(("kind", "count"), [("torch", 1000), ("vllm", 64)])
def test_the_trainer_gets_the_sampled_ids_and_ratios_of_one(kind: EngineKind, count: int, tmp_path: Path) -> None:
    """Trained-on ids are the sampled ids, through recorder, disk and batch; under unchanged weights the trainer's
    probability of each is the engine's, at the same temperature and mask."""
    write_config(Qwen3Shape(layers=2), tmp_path)
    settings = TrainSettings(group_size=4)
    backend = make_backend(tmp_path, seed=3, settings=settings, dtype="float32", from_scratch=True)
    engine = make_engine(kind, tmp_path, max_sequences=AT_ONCE, max_model_len=255, dtype="float32")
    try:
        engine.load_weights(0, backend.export())
        played = play(engine, Workbench(EnvironmentSettings(), tmp_path), count)
    finally:
        engine.close()

    store = TrajectoryStore(tmp_path / "store.log")
    for trajectory in played.trajectories:
        check_trajectory(trajectory)
        store.put(trajectory)
    store.close()
    reopened = TrajectoryStore(tmp_path / "store.log")
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in played.trajectories:
        groups[trajectory.group].append(reopened.get(trajectory.ticket))
    reopened.close()
    batch = make_batch(list(groups.values()), settings)

    trained: dict[str, list[int]] = defaultdict(list)
    for sequence in batch.sequences:
        trained[sequence.ticket] += sequence.tokens[sequence.loss_mask == 1].tolist()
    assert len(trained) == count
    assert trained == played.sampled

    for sequence, logprobs in zip(batch.sequences, backend.logprobs(batch), strict=True):
        mask = sequence.loss_mask == 1
        ratios = np.exp(logprobs[mask].astype(np.float64) - sequence.logprobs[mask].astype(np.float64))
        np.testing.assert_allclose(ratios, 1.0, atol=1e-4)
