"""The admin shell at a real terminal, beside a real run."""

from __future__ import annotations

import getpass
import json
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.bundle.test_files import contents
from tests.end_to_end.runs import FROZENLAKE, TINY, training
from tests.support.adminshell import AdminShell
from tests.support.ports import free_port
from tests.support.running import Command, Ended, ran, started
from tests.support.terminal import Terminal, python_module

ADMIN = "coordinator.commands.admin"
BUNDLE = "coordinator.commands.support_bundle"
START_S = 600.0


class LiveRun:
    """A run that goes on for as long as the tests of this file need it."""

    def __init__(self, command: Command, shell: AdminShell) -> None:
        self.command = command
        self._shell = shell
        self.directory = command.directory
        self._asked = 0

    def terminal(self, *words: str) -> Terminal:
        state = self.directory / "state"
        return Terminal(self.directory, python_module(ADMIN, *words), {"XDG_STATE_HOME": str(state)})

    def once(self, *words: str) -> Ended:
        self._asked += 1
        return ran(ADMIN, *words, directory=self.directory, timeout_s=120.0, name=f"admin-{self._asked}")

    def last_admitted(self) -> str:
        """The ticket that was begun last."""
        lines = (self.directory / "runs" / "latest" / "ledger.jsonl").read_text().splitlines()
        admitted = [event for event in map(json.loads, lines) if event["event"] == "admitted"]
        ticket: str = admitted[-1]["tickets"][-1]
        return ticket

    def script(self, *lines: str) -> list[Any]:
        """The answers to these lines."""
        return [self.json(line) for line in lines]

    def json(self, line: str) -> Any:
        return self._shell.ask(line)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    directory = tmp_path_factory.mktemp("admin")
    endless = ["train.steps=1000000", "checkpoint.every=0", f"coordinator.metrics_port={free_port()}"]
    with training(directory, str(FROZENLAKE), *TINY, *endless) as command:
        command.wait_for("step 2/", timeout_s=START_S)
        with AdminShell(directory) as shell:
            yield LiveRun(command, shell)


def test_it_completes_commands_and_live_names_and_remembers_lines_between_sessions(run: LiveRun) -> None:
    with run.terminal() as terminal:
        terminal.until("^admin> *$")
        terminal.type("stat", "Tab")
        terminal.until("^admin> status")
        terminal.type("", "Enter")
        terminal.until(r"^run \S+-frozenlake: running, step \d+/1000000")
        terminal.type("actors eng", "Tab")
        terminal.until("^admin> actors engine-0")
        terminal.type("", "Enter")
        terminal.until(r"^engine +engine-0 +EngineHost +\d+ +\d+")
        terminal.type("", "C-d")
        assert terminal.status() == 0
    with run.terminal() as terminal:
        terminal.until("^admin> *$")
        terminal.type("", "Up")
        terminal.until("^admin> actors engine-0")
        terminal.type("", "Up")
        terminal.until("^admin> status")


def test_a_trajectory_is_followed_to_its_end(run: LiveRun) -> None:
    with run.terminal("follow") as terminal:
        screen = terminal.until(r" s  [te]\d\S*  (stored|lost|evaluated)")
        assert terminal.status() == 0
    ticket = re.findall(r" s  (\S+)  (?:stored|lost|evaluated)", screen)[0]
    assert re.search(rf" s  {ticket}  turn \d+  version \S+  waits for (reset|engine|environment|reward|store)", screen)
    assert re.search(r"action: '[LDRU]'", screen)


def test_ctrl_c_ends_the_line_or_the_command_and_not_the_shell(run: LiveRun) -> None:
    with run.terminal() as terminal:
        terminal.until("^admin> *$")
        terminal.type("half a line", "C-c")
        terminal.enter("pause")
        terminal.until("^paused: nothing is admitted")
        run.command.until(lambda: run.json("trajectories") == {"running": []}, timeout_s=300.0, what="ran dry")
        terminal.enter("follow")  # there is nothing to follow
        time.sleep(2.0)
        terminal.type("", "C-c")
        terminal.until("^interrupted")
        terminal.enter("resume")
        terminal.until("^going on")
        terminal.enter("xyzzy")
        terminal.until("^error: unknown command 'xyzzy'; expected one of: status, ")
        terminal.enter("staus")
        terminal.until("^error: unknown command 'staus'; did you mean 'status'")
        terminal.enter("quit")
        assert terminal.status() == 0
        assert "Traceback" not in terminal.screen()


def test_every_process_is_found_with_its_actors_and_their_figures(run: LiveRun) -> None:
    nodes = {node["name"]: node for node in run.json("nodes")["nodes"]}
    parents = {name: node["parent"] for name, node in nodes.items()}
    assert parents == {"control": "", "engine-0": "control", "trainer-0": "control", "env-worker-0": "control"}
    assert all(node["description"] is not None for node in nodes.values())
    engine = nodes["engine-0"]["description"]["actors"]["engine"]
    assert sum(engine["latency"]) > 0
    assert engine["took_s"] > 0


def test_how_loaded_the_engine_is_is_shown_under_its_name(run: LiveRun) -> None:
    """It is told once a second, for the first time a second after the engine's start."""

    def load_of_one() -> Any:
        return run.json("engines")["engines"][0]["load"]

    run.command.until(lambda: load_of_one() is not None, timeout_s=60.0, what="said how loaded its engine is")
    load = load_of_one()
    assert (load["figure"] == "gpu_utilisation") == bool(load["devices"])
    assert 0 <= load["occupancy"] <= 1
    assert 0 <= load["busy"] <= 1


def test_each_part_of_the_run_is_shown(run: LiveRun) -> None:
    looks = ("engines", "queues", "versions", "shards", "hardware", "jobs")
    engines, queues, versions, shards, hardware, jobs = run.script(*looks)
    assert engines["engines"][0]["name"] == "engine-0"
    assert (queues["admission"], queues["capacity"], queues["groups_needed"]) == ("open", 4, 2)
    assert [level["name"] for level in queues["tickets"]["levels"]] == ["evaluation", "short", "elastic"]
    (proven,) = versions["weights"]["proven"]
    assert proven["engine"] == "engine-0"
    assert proven["canary_nats"] < 1e-3
    assert (shards["store"], shards["shards"][0]["name"]) == ("embedded", "embedded")
    written = {one["operation"]: one for one in shards["shards"][0]["operations"]}["write"]
    assert written["calls"] == sum(written["counts"]) > 0
    assert "cpu" in {device["id"] for device in hardware["nodes"][0]["affinity"]["devices"]}
    assert {place["name"] for place in hardware["places"]} >= {"engine-0", "trainer-0"}
    assert jobs["jobs"][0]["state"] == "running"


def test_prometheus_reads_the_figures_of_every_node_at_one_place(run: LiveRun) -> None:
    address = run.command.wait_for(r"metrics for Prometheus: (http://\S+)", timeout_s=5.0)[1]
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    up = {sample.labels["node"]: sample.value for sample in families["rollart_up"].samples}
    assert up == {"control": 1, "engine-0": 1, "trainer-0": 1, "env-worker-0": 1}
    taken = {
        (sample.labels["node"], sample.labels["actor"])
        for sample in families["rollart_actor_messages"].samples
        if sample.value > 0
    }
    assert {("control", "proxy"), ("control", "env"), ("engine-0", "engine")} <= taken
    (version,) = families["rollart_learner_version"].samples
    assert version.value >= 2
    assert families["rollart_sampled_tokens"].samples[0].value > 0
    ended = {sample.labels["outcome"]: sample.value for sample in families["rollart_trajectories_ended"].samples}
    assert ended["trained"] >= 16  # two steps on two groups of four
    shown = run.once("metrics", "up")
    assert set(shown.stdout.split()[::2]) == {f'rollart_up{{node="{node}"}}' for node in up}


def test_every_order_is_written_down_with_who_gave_it(run: LiveRun) -> None:
    user = f"{getpass.getuser()}@{socket.gethostname()}"
    more, less, audit = run.script("set lambda 1", "set lambda 0", "audit 2")
    assert more["message"] == "lambda was 0 and is now 1; at most 5 groups run"
    assert less["message"] == "lambda was 1 and is now 0; at most 4 groups run"
    orders = [(line["by"], line["order"], line["before"], line["after"], line["result"]) for line in audit["lines"]]
    assert orders == [(user, "set lambda 1", "0", "1", "done"), (user, "set lambda 0", "1", "0", "done")]
    lines = (run.directory / "runs" / "latest" / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines][-2:] == audit["lines"]


def test_what_may_cost_something_is_refused_without_a_terminal_and_asked_about_at_one(run: LiveRun) -> None:
    ended = run.once("set", "alpha", "0")
    assert ended.status == 1
    assert "set alpha 0: alpha is 1: trajectories that are older than the new bound are thrown away" in ended.stderr
    assert "say --yes" in ended.stderr
    with run.terminal() as terminal:
        terminal.until("^admin> *$")
        terminal.enter("set alpha 0")
        terminal.until(r"Go on\? \[yes/no\]")
        terminal.enter("no")
        terminal.until("^error: nothing was changed")
        terminal.enter("status")
        terminal.until("^version .*, alpha 1, ")
        terminal.enter("set alpha 0")
        terminal.until(r"Go on\? \[yes/no\]", times=2)
        terminal.enter("yes")
        terminal.until("^alpha was 1 and is now 0")
        terminal.enter("set alpha 1")
        terminal.until("^alpha was 0 and is now 1")


def test_a_trajectory_that_waits_is_explained_and_aborted_and_its_host_drained_and_filled(run: LiveRun) -> None:
    assert "control is given no new tickets" in run.json("drain control")["message"]

    def newest_waits() -> bool:
        return bool(run.json(f"explain {run.last_admitted()}")["state"] == "waiting")

    run.command.until(lambda: run.json("trajectories") == {"running": []}, timeout_s=300.0, what="ran dry")
    run.command.until(newest_waits, timeout_s=300.0, what="admitted one more")
    ticket = run.last_admitted()
    refused = run.once("abort", ticket)
    assert refused.status == 1
    assert f"abort {ticket}: it is counted lost (aborted_by_order)" in refused.stderr
    waits, queues, aborted, lost, rebalanced, filled, audit = run.script(
        f"explain {ticket}", "queues", f"abort {ticket}", f"explain {ticket}", "rebalance", "fill control", "audit 4"
    )
    assert waits["state"] == "waiting"
    assert "Every env host is being drained (control): fill one again." in waits["why"]
    assert queues["tickets"]["hosts"][0]["draining"] is True
    assert aborted["message"] == f"{ticket} waited and is lost, aborted_by_order"
    assert lost["state"] == "lost"
    assert rebalanced["message"] == "no engine holds more than its share of trajectories that could be moved now"
    assert filled["message"] == "control is given tickets again"
    assert [(line["order"], line["before"], line["after"]) for line in audit["lines"]] == [
        ("drain control", "given tickets", "draining"),
        (f"abort {ticket}", "admitted", "not live"),
        ("rebalance", "", ""),
        ("fill control", "draining", "given tickets"),
    ]
    step = run.json("status")["step"]
    run.command.wait_for(rf"step {step + 3}/", timeout_s=START_S)
    shown = run.once("explain", ticket).stdout
    assert re.search(rf"^{ticket}: lost, group \d+", shown)
    assert "aborted_by_order" in shown
    ended = run.once("--yes", "abort", "t0")
    assert "t0 is not live: only one that waits or runs can be aborted" in ended.stderr


def test_a_bundle_of_a_live_run_has_what_every_node_says_and_no_secret(run: LiveRun) -> None:
    bundle = run.directory / "bundle.tar.gz"
    words = ["runs/latest", "--output", str(bundle)]
    with started(BUNDLE, *words, directory=run.directory, name="bundle", environment={"HF_TOKEN": "hf-5ecret"}) as made:
        assert made.wait(timeout_s=300.0) == 0, made.said()
    found = contents(bundle)
    nodes = json.loads(found["live/nodes.json"])["nodes"]
    assert {node["name"] for node in nodes if node["description"]} == {
        "control",
        "engine-0",
        "trainer-0",
        "env-worker-0",
    }
    assert "rollart_up" in found["live/metrics.prom"]
    assert {"run/logs/control.log", "run/logs/engine-0.log", "run/job.yaml", "host/hardware.json"} <= set(found)
    assert "hf-5ecret" not in "".join(found.values())
    elsewhere = run.directory / "elsewhere.tar.gz"
    address = json.loads(found["live/nodes.json"])["nodes"][0]["control"]
    ended = ran(BUNDLE, "--join", address, "--output", str(elsewhere), directory=run.directory, timeout_s=300.0)
    assert ended.status == 0, ended
    fetched = contents(elsewhere)
    assert fetched["run/job.yaml"] == found["run/job.yaml"]
    assert "run/logs/engine-0.log" in fetched
    assert json.loads(fetched["run/summary.json"])["steps"] >= json.loads(found["run/summary.json"])["steps"]


def test_what_is_not_there_is_named_with_what_is(run: LiveRun) -> None:
    ended = run.once("actors", "engine-9")
    assert (ended.status, ended.stdout) == (1, "")
    assert "there is no node 'engine-9'; there are control, " in ended.stderr
    ended = run.once("follow", "t999999999")
    assert "trajectory t999999999 does not run" in ended.stderr
    ended = run.once("set", "alpha", "two")
    assert "expected: set alpha N, with a whole number of 0 or more; found 'two'" in ended.stderr


def test_a_coordinator_that_is_not_there_is_named_with_the_deadline(tmp_path: Path) -> None:
    words = ["--connect", "tcp://127.0.0.1:9", "--timeout", "1", "status"]
    ended = ran(ADMIN, *words, directory=tmp_path, timeout_s=60.0, name="nobody")
    assert ended.status == 1
    assert "tcp://127.0.0.1:9: the coordinator has not answered within 1 s" in ended.stderr
    ended = ran(ADMIN, "status", directory=tmp_path, timeout_s=60.0, name="no-run")
    assert "runs/latest: no such run directory" in ended.stderr
