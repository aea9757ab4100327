"""The quick-start job learns, whatever it is made of: engines, trainers, stores, processes, staleness bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from kazoo.client import KazooClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from actors.telemetry import Span
from coordinator.observe.overlap import Overlap, overlap
from tests.end_to_end.runs import FROZENLAKE, ROLES, Run, balance, separate_processes, trained, training
from tests.support.adminshell import AdminShell
from tests.support.running import Command, Ended, ran
from tests.support.zookeeper import zookeeper_servers

TIMEOUT_S = 300.0


def check_learned(run: Run, ended: Ended) -> None:
    """It went from failure to success, on trajectories that add up, and left nothing running."""
    assert (ended.status, ended.leftovers) == (0, []), ended
    success = [evaluation["success"] for evaluation in run.evaluations()]
    assert success[0] < 0.15
    assert success[-1] >= 0.95
    assert "evaluation target 0.95 is reached" in ended.stdout
    steps = run.steps()
    assert [step["version"] for step in steps] == list(range(1, len(steps) + 1))
    counts = balance(ended.stdout)
    assert counts["trained"] == 64 * len(steps)
    assert counts.pop("admitted") == sum(counts.values())
    assert run.checkpoint()["version"] == len(steps)


def overlapped(run: Run) -> Overlap:
    return overlap(msgspec.convert(span, Span) for span in run.spans())


# ---- one process tree -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Ended]:
    """The quick start with the embedded engine."""
    directory = tmp_path_factory.mktemp("learned")
    ended = trained(directory, str(FROZENLAKE), "rollout.engine=torch", timeout_s=TIMEOUT_S)
    return Run.latest(directory), ended


def test_the_quick_start_learns_with_the_torch_engine(learned: tuple[Run, Ended]) -> None:
    run, ended = learned
    check_learned(run, ended)
    assert ended.stderr == ""
    assert max(step["staleness_max"] for step in run.steps()) <= 1


def test_rollout_and_training_overlap_when_a_step_may_train_on_older_versions(learned: tuple[Run, Ended]) -> None:
    both = overlapped(learned[0])
    assert both.training_s > 0
    assert both.share > 0.1


def test_a_run_directory_holds_all_that_a_user_looks_for(learned: tuple[Run, Ended]) -> None:
    run, _ = learned
    job = yaml.safe_load((run.path / "job.yaml").read_text())
    assert (job["name"], job["rollout"]["engine"], job["rollout"]["engines"]) == ("frozenlake", "torch", 1)
    for node in ("control", "engine-0", "trainer-0", "env-worker-0"):
        assert {event["node"] for event in run.events(node)} == {node}
    assert {"control.log", "engine-0.log", "trainer-0.log", "env-worker-0.log"} <= {
        path.name for path in (run.path / "logs").iterdir()
    }
    best = int((run.path / "checkpoints" / "best").read_text())
    assert best == run.checkpoint()["version"]
    lanes = {span["lane"] for span in run.spans()}
    assert {"engine-0", "trainer", "coordinator", "weightsync"} <= lanes
    report = (run.path / "report.html").read_text()
    assert "<svg" in report
    assert "evaluation target 0.95 is reached" in report
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", report)  # self-contained


def test_tensorboard_reads_the_same_numbers_as_the_metrics_file(learned: tuple[Run, Ended]) -> None:
    run, _ = learned
    events = EventAccumulator(str(run.path / "events"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("reward/mean")}
    assert logged == {step["version"]: pytest.approx(step["reward_mean"], abs=1e-6) for step in run.steps()}
    successes = [event.value for event in events.Scalars("success/evaluation")]
    assert successes == [pytest.approx(evaluation["success"]) for evaluation in run.evaluations()]


def test_samples_are_readable_text(learned: tuple[Run, Ended]) -> None:
    run, _ = learned
    samples = run.samples()
    assert len(samples) >= len(run.steps())
    texts = "".join(path.read_text() for path in (run.path / "samples").glob("*.txt"))
    assert samples[0]["transcript"][0][1].splitlines()[0] in texts


def test_eval_measures_the_best_policy_on_fresh_tasks(learned: tuple[Run, Ended], tmp_path: Path) -> None:
    run, _ = learned
    ended = ran("coordinator.commands.eval", str(run.path), "--json", directory=tmp_path, timeout_s=TIMEOUT_S)
    assert (ended.status, ended.leftovers) == (0, []), ended
    figures = json.loads(ended.stdout)
    assert figures["version"] == int((run.path / "checkpoints" / "best").read_text())
    assert (figures["episodes"], figures["lost"]) == (64, 0)
    assert figures["success"] >= 0.95


def test_play_shows_one_episode_turn_by_turn(learned: tuple[Run, Ended], tmp_path: Path) -> None:
    ended = ran("coordinator.commands.play", str(learned[0].path), directory=tmp_path, timeout_s=TIMEOUT_S)
    assert (ended.status, ended.leftovers) == (0, []), ended
    turns = re.findall(r"^ +turn (\d+): ([LDRU])$", ended.stdout, re.MULTILINE)
    assert len(turns) >= 6  # the shortest way
    assert f"success after {len(turns)} turns, return 1" in ended.stdout


def test_it_learns_with_vllm_generating_and_megatron_training(tmp_path: Path) -> None:
    parts = ["rollout.engine=vllm", "train.backend=megatron"]
    ended = trained(tmp_path, str(FROZENLAKE), *parts, timeout_s=TIMEOUT_S)
    check_learned(Run.latest(tmp_path), ended)
    assert overlapped(Run.latest(tmp_path)).share > 0.1


@pytest.mark.deep
def test_it_learns_through_two_stages_of_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    mesh = ["train.backend=megatron", "train.tensor_parallel=2", "train.pipeline_parallel=2", "policy.shape.layers=4"]
    ended = trained(tmp_path, str(FROZENLAKE), "rollout.engine=torch", *mesh, timeout_s=900.0)
    check_learned(Run.latest(tmp_path), ended)


# ---- stores ---------------------------------------------------------------------------------------------------------


@contextmanager
def kept_in(address: str) -> Iterator[KazooClient]:
    """A client of its own on one server."""
    client = KazooClient(hosts=address, timeout=4.0)
    client.start(timeout=20.0)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def entries(address: str) -> dict[str, bytes]:
    """All that the run keeps on one server."""
    with kept_in(address) as client:
        found: dict[str, bytes] = {}
        waiting = ["/rollart"] if client.exists("/rollart") else []
        while waiting:
            path = waiting.pop()
            found[path.removeprefix("/rollart")] = client.get(path)[0]
            waiting += [f"{path}/{name}" for name in client.get_children(path)]
        return found


def learn_with_stores(directory: Path, addresses: list[str], *overrides: str) -> dict[str, bytes]:
    """Learn with the facts on these servers; returns what they hold afterwards, having looked meanwhile."""
    store = f"coordinator.store=zk://{';'.join(addresses)}"
    arguments = [str(FROZENLAKE), "rollout.engine=torch", store, *overrides]
    with training(directory, *arguments) as command:
        command.wait_for("step 1/", timeout_s=TIMEOUT_S)
        run = Run.latest(directory)
        members = [path for address in addresses for path in entries(address) if path.startswith("/members/")]
        assert members == [f"/members/{run.path.name}.control"]
        status = command.wait(timeout_s=TIMEOUT_S)
        check_learned(run, Ended(status, command.stdout, command.stderr, command.leftovers()))
    held = [entries(address) for address in addresses]
    kept = {path: value for one in held for path, value in one.items() if path.startswith(f"/jobs/{run.path.name}/")}
    state = json.loads(kept[f"/jobs/{run.path.name}/status"])
    assert state == {"state": "done", "version": len(run.steps()), "format": 1}
    assert "cpu" in kept[f"/jobs/{run.path.name}/nodes/control/affinity"].decode()
    placed = json.loads(kept[f"/jobs/{run.path.name}/nodes/control/binding"])["places"]
    assert "engine-0" in [place["name"] for place in placed]
    assert not [path for one in held for path in one if path.startswith("/members/")]
    return kept


def test_it_learns_on_fresh_trajectories_alone_with_its_facts_in_zookeeper(tmp_path: Path) -> None:
    with zookeeper_servers(count=1) as addresses:
        learn_with_stores(tmp_path, addresses, "scheduling.alpha=0")
    run = Run.latest(tmp_path)
    assert max(step["staleness_max"] for step in run.steps()) == 0
    assert overlapped(run).share < 0.02


def test_it_learns_with_two_megatron_ranks_older_versions_and_two_zookeepers(tmp_path: Path) -> None:
    parts = ["scheduling.alpha=4", "train.backend=megatron", "train.tensor_parallel=2"]
    parts += ["train.learning_rate=2.5e-4", "train.steps=120"]  # every batch is four versions old: smaller steps
    with zookeeper_servers(count=2) as addresses:
        learn_with_stores(tmp_path, addresses, *parts)
    run = Run.latest(tmp_path)
    assert 1 < max(step["staleness_max"] for step in run.steps()) <= 4
    assert overlapped(run).share > 0.1


# ---- separate processes ---------------------------------------------------------------------------------------------


def test_it_learns_as_separate_processes_and_takes_orders_meanwhile(tmp_path: Path) -> None:
    with separate_processes(tmp_path, "rollout.engine=torch") as (lead, roles):
        lead.wait_for("step 3/", timeout_s=TIMEOUT_S)
        with AdminShell(lead.directory) as shell:
            take_orders(lead, shell.ask)
        status = lead.wait(timeout_s=TIMEOUT_S)
        for role, command in roles.items():
            assert command.wait(timeout_s=30.0) == 0, command.said()
            assert f"{role}-node: the run has ended" in command.stdout
        run = Run.latest(tmp_path)
        check_learned(run, Ended(status, lead.stdout, lead.stderr, lead.leftovers()))
        for command in roles.values():
            assert command.leftovers() == []
    logs = {path.name for path in (run.path / "logs").iterdir()}
    assert {f"{role}-node.log" for role in ROLES} | {"control.log", "proxy-node.engine-0.log"} <= logs


def take_orders(lead: Command, admin: Callable[[str], Any]) -> None:
    """What the admin shell shows and changes."""
    assert "paused" in admin("pause")["message"]
    status = admin("status")
    assert (status["state"], status["alpha"], status["steps"]) == ("paused", 1, 60)
    assert [engine["name"] for engine in status["engines"]] == ["proxy-node.engine-0"]
    found = admin("nodes")["nodes"]
    nodes = {node["name"]: node["roles"] for node in found if not node["parent"]}
    assert nodes == {"control": ["coordinator"], **{f"{role}-node": [role] for role in ROLES}}
    lead.until(lambda: admin("trajectories") == {"running": []}, timeout_s=300.0, what="ran dry")
    assert admin("status")["in_flight"] == 0
    assert admin("set alpha 2")["message"].startswith("alpha was 1 and is now 2")
    after = admin("status")
    assert (after["state"], after["alpha"]) == ("paused", 2)
    assert after["step"] <= status["step"] + 1  # the one that was under way
    assert admin("resume")["message"] == "going on"


# ---- seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("engine", "limit_s"), [("torch", 180.0), ("vllm", 240.0)])
def test_every_seed_learns_in_time(tmp_path: Path, engine: str, limit_s: float, seed: int) -> None:
    job = [str(FROZENLAKE), f"rollout.engine={engine}", f"seed={seed}"]
    ended = trained(tmp_path, *job, timeout_s=limit_s)
    check_learned(Run.latest(tmp_path), ended)
