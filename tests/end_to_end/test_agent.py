"""An agent that speaks OpenAI's API drives a training run, and what is trained on is what the engine sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.trainer.coding import LOGPROB_ERROR
from actors.trainer.store import read_records
from actors.trajectory import Trajectory
from tests.agents.test_conversation import HERMES
from tests.end_to_end.runs import TRAIN, Run, balance, everywhere
from tests.end_to_end.tiny_model import make_model
from tests.support.running import ROOT, ran

pytest.importorskip("openai")

TURNS, STEPS, GROUPS, MEMBERS = 3, 2, 3, 2

JOB = """
name: tools
environment:
  name: tests.end_to_end.tool_agent:run
  options: {{turns: {turns}, journal: {journal}, letters_only: {letters_only}}}
  agent: {{tool_calls: {tool_calls}}}
  max_turns: {turns}
  workers: 1
policy: {policy}
rollout: {{engine: {engine}, max_tokens_per_turn: 6}}
train: {{steps: {steps}, groups_per_step: {groups}, group_size: {members}, record: true}}
scheduling: {{alpha: 0}}
evaluation: {{every: 0, episodes: 0}}
"""

WATCHED_ENGINE = """
import importlib.abc, importlib.util, json, os, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "actors.proxy.engines.{engine}_engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def watched(module):
            run(module)
            engine = getattr(module, "{engine}".title() + "Engine")
            add, step = engine.add, engine.step
            file = open(os.path.join({journal!r}, f"engine-{{os.getpid()}}.jsonl"), "a")
            def adds(self, request):
                line = dict(id=request.request_id, prompt=request.prompt.tolist())
                print(json.dumps(line), file=file, flush=True)
                return add(self, request)
            def steps(self):
                done = step(self)
                for each in done:
                    line = dict(id=each.request_id, tokens=each.tokens.tolist(),
                                logprobs=each.logprobs.tolist(), versions=each.versions.tolist())
                    print(json.dumps(line), file=file, flush=True)
                return done
            engine.add, engine.step = adds, steps
        spec.loader.exec_module = watched
        return spec

sys.meta_path.insert(0, Watch())
"""
"""In the engine's process: what it was asked and what it sampled, written down where it leaves the engine."""


EXAMPLE = ROOT / "examples" / "my_agent.yaml"


def journalled(journal: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the engine did, by request; what the agent was told, one entry a session."""
    engine: dict[str, dict[str, Any]] = {}
    for path in journal.glob("engine-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            engine.setdefault(line["id"], {}).update(line)
    agent = [json.loads(line) for path in journal.glob("agent-*.jsonl") for line in path.read_text().splitlines()]
    return engine, agent


def sampled_turns(trajectory: Trajectory) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """Of each turn: all tokens before it in its segment; the sampled ones, their log-probabilities and versions."""
    turns = []
    for segment in trajectory.segments:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], segment.loss_mask, [0]]).astype(int)))
        for start, end in edges.reshape(-1, 2):
            turns.append(
                (
                    segment.tokens[:start].tolist(),
                    segment.tokens[start:end].tolist(),
                    segment.logprobs[start:end].tolist(),
                    segment.versions[start:end].tolist(),
                )
            )
    return turns


def job_of(directory: Path, journal: Path, engine: str, policy: str) -> str:
    """``bytes``: random weights that say few different things, among them calls; ``chat``: a model directory whose
    template tells of tools."""
    chats = policy == "chat"
    if chats:
        (make_model(directory / "model") / "chat_template.jinja").write_text(HERMES)
    return JOB.format(
        turns=TURNS,
        journal=journal,
        letters_only=str(not chats).lower(),
        tool_calls="hermes" if chats else "line",
        policy="{path: model}" if chats else "{shape: {hidden_size: 32, layers: 1}}",
        engine=engine,
        steps=STEPS,
        groups=GROUPS,
        members=MEMBERS,
    )


@pytest.mark.parametrize(
    ("engine", "policy"),
    [
        ("torch", "bytes"),
        pytest.param("torch", "chat", marks=pytest.mark.deep),
        pytest.param("vllm", "chat", marks=pytest.mark.deep),
    ],
)
def test_an_unmodified_agent_drives_training_and_what_is_trained_on_is_what_was_sampled(
    tmp_path: Path, engine: str, policy: str
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    journal = tmp_path / "journal"
    journal.mkdir()
    job = tmp_path / "job.yaml"
    job.write_text(job_of(tmp_path, journal, engine, policy))
    watching = everywhere(tmp_path, WATCHED_ENGINE.format(journal=str(journal), engine=engine))
    ended = ran(TRAIN, str(job), directory=tmp_path, timeout_s=300.0, environment=watching)
    assert (ended.status, ended.leftovers) == (0, []), ended
    assert balance(ended.stdout)["lost"] == 0
    run = Run.latest(tmp_path)
    recorded = [each for path in sorted((run.path / "recorded").glob("v*.log")) for each, _ in read_records(path)]
    assert len(recorded) == STEPS * GROUPS * MEMBERS
    sampled_there, agent = journalled(journal)
    told = {turn["id"].removeprefix("chatcmpl-"): turn for session in agent for turn in session["told"]}
    for trajectory in recorded:
        turns = sampled_turns(trajectory)
        assert len(turns) == trajectory.turns == TURNS
        assert len(trajectory.segments) == (2 if trajectory.task % 3 == 0 else 1)
        for index, (prompt, tokens, logprobs, versions) in enumerate(turns):
            request = f"{trajectory.ticket}/{index}"
            sampled = sampled_there[request]
            assert (prompt, tokens, versions) == tuple(sampled[key] for key in ("prompt", "tokens", "versions"))
            assert (prompt, tokens) == (told[request]["prompt"], told[request]["tokens"])
            assert sampled["logprobs"] == told[request]["logprobs"]
            assert logprobs == pytest.approx(sampled["logprobs"], abs=LOGPROB_ERROR, rel=0)
            assert told[request]["edits"] == (index == TURNS - 1 and trajectory.task % 3 == 0)
        if len(trajectory.segments) == 2:  # the answer that was kept has its sampled ids there, too
            (prompt, *_), answer = turns[-1], turns[-2][1]
            assert any(prompt[at : at + len(answer)] == answer for at in range(len(prompt)))
    assert {trajectory.task % 3 == 0 for trajectory in recorded} == {True, False}
    called = sum(trajectory.reward for trajectory in recorded)
    assert called > 0 if policy == "bytes" else called == 0  # random weights write no JSON
    assert max(versions[-1] for each in recorded for *_, versions in sampled_turns(each)) > 0


@pytest.mark.deep
def test_the_example_learns_to_use_its_tools(tmp_path: Path) -> None:
    ended = ran(TRAIN, str(EXAMPLE), "rollout.engine=torch", directory=tmp_path, timeout_s=600.0)
    assert (ended.status, ended.leftovers) == (0, []), ended
    assert "evaluation target 0.95 is reached" in ended.stdout
    assert balance(ended.stdout)["lost"] == 0
    first, *_, last = Run.latest(tmp_path).evaluations()
    assert first["success"] < 0.7
    assert last["success"] >= 0.95
    assert last["turns_mean"] == 2.0  # the note, then the box
