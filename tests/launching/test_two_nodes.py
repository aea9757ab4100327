"""A job over two hosts (127.0.0.1 and 127.0.0.2), really started: by the batch script through stand-ins for ``srun``
and ``scontrol``, and by the host list through a stand-in for ssh. Both with a key."""

from __future__ import annotations

import re
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest
import yaml

from bus.security import make_key
from coordinator.resources.measured import mix_of_run
from hwprobe.delegation import standing
from tests.end_to_end.runs import FROZENLAKE, TINY, Run, balance
from tests.support.ports import free_port
from tests.support.running import ROOT, Command, ran

LIMIT = "binding.limits={env-worker: {memory_gib: 4}}"
SHORT = (*TINY, "train.steps=1", "environment.workers=1", "evaluation.episodes=1", LIMIT)
TIMEOUT_S = 400.0

# Runs the command once a node, as srun does; passes SIGTERM on to all tasks, and returns the highest exit status.
SRUN = r"""#!/bin/bash
while [[ $1 == --* ]]; do case $1 in --nodes=*) nodes=${1#*=} ;; esac; shift; done
echo "$*" >>srun.asked
trap 'kill -TERM "${tasks[@]}" 2>/dev/null' TERM
for ((node = 0; node < nodes; node++)); do
    SLURM_PROCID=$node SLURM_NODEID=$node SLURMD_NODENAME=127.0.0.$((node + 1)) "$@" &
    tasks+=($!)
done
worst=0
for task in "${tasks[@]}"; do
    status=0
    wait "$task" || status=$?
    while kill -0 "$task" 2>/dev/null; do wait "$task"; status=$?; done
    [ "$status" -le "$worst" ] || worst=$status
done
exit "$worst"
"""
SCONTROL = "#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n'\n"
SSH = '#!/bin/sh\necho "$1" >>ssh.asked\nexec sh -c "$2"\n'


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def hosts_that_joined(stdout: str) -> set[str]:
    return set(re.findall(r"^(\w+-\d) joined: ", stdout, re.MULTILINE))


def check_run(directory: Path, stdout: str) -> None:
    assert [step["version"] for step in Run.latest(directory).steps()] == [1]
    assert balance(stdout)["trained"] == 8  # one step of two groups of four
    mix = mix_of_run(Run.latest(directory).path)
    assert (mix.in_flight, list(mix.tasks)) == (16, ["frozenlake"])  # (1 + alpha) times two groups of four
    assert 1 <= mix.tasks["frozenlake"].turns <= 3
    why = standing().missing.get("memory")
    assert (f"memory of env-worker is not limited: {why}" in stdout) == (why is not None)
    assert hosts_that_joined(stdout) == {"trainer-0", "weightsync-0", "reward-0", "proxy-1", "env-1"}


def sbatch(directory: Path, *overrides: str) -> Command:
    """The batch script, as Slurm would run it on the first of two nodes."""
    tools = directory / "tools"
    tools.mkdir()
    script(tools, "srun", SRUN)
    script(tools, "scontrol", SCONTROL)
    words = ["bash", str(ROOT / "deploy" / "slurm" / "rollart.sbatch"), str(FROZENLAKE), *SHORT, *overrides]
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "ROLLART_PORT": str(free_port()),
        "ROLLART_START_NODE": f"{sys.executable} -m coordinator.commands.start_node",
        "ROLLART_KEYS": f"{sys.executable} -m coordinator.commands.keys",
    }
    return Command("sbatch", words, directory, environment)


def host_list(directory: Path) -> Path:
    """Two hosts, reached by a stand-in for ssh."""
    ssh = script(directory, "ssh", SSH)
    key = directory / "cluster.key"
    make_key(key)
    hosts = {
        "port": free_port(),
        "key_file": str(key),
        "directory": str(directory),
        "start": f"{sys.executable} -m coordinator.commands.start {{role}}",
        "shell": [str(ssh), "{host}"],
        "hosts": [{"host": "first", "address": "127.0.0.1"}, {"host": "second", "address": "127.0.0.2"}],
    }
    path = directory / "hosts.yaml"
    path.write_text(yaml.safe_dump(hosts))
    return path


def test_a_two_node_job_runs_under_slurm(tmp_path: Path) -> None:
    command = sbatch(tmp_path)
    try:
        assert command.wait(timeout_s=TIMEOUT_S) == 0, command.said()
        assert command.leftovers(grace_s=5.0) == []
    finally:
        command.kill()
    check_run(tmp_path, command.stdout)
    assert "--coordinator 127.0.0.1 --port" in (tmp_path / "srun.asked").read_text()
    assert not (tmp_path / "rollart-4711.key").exists()  # made for this job alone


def test_a_two_node_job_runs_over_a_bare_host_list(tmp_path: Path) -> None:
    words = [str(host_list(tmp_path)), str(FROZENLAKE), *SHORT]
    ended = ran("coordinator.commands.launch", *words, directory=tmp_path, timeout_s=TIMEOUT_S)
    assert (ended.status, ended.leftovers) == (0, []), ended
    check_run(tmp_path, ended.stdout)
    assert sorted((tmp_path / "ssh.asked").read_text().split()) == ["first"] * 4 + ["second"] * 2


@pytest.mark.deep
def test_a_job_that_slurm_ends_leaves_a_checkpoint(tmp_path: Path) -> None:
    """SIGTERM to the batch script, as ten minutes before the time limit."""
    command = sbatch(tmp_path, "train.steps=100000")
    check_interrupted(command, tmp_path)


@pytest.mark.deep
def test_a_launch_that_is_interrupted_leaves_a_checkpoint(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "coordinator.commands.launch", str(host_list(tmp_path)), str(FROZENLAKE), *SHORT]
    check_interrupted(Command("launch", [*words, "train.steps=100000"], tmp_path, {}), tmp_path)


def check_interrupted(command: Command, directory: Path) -> None:
    try:
        command.wait_for(r"step \d+/100000", timeout_s=TIMEOUT_S)
        command.send(signal.SIGTERM)
        assert command.wait(timeout_s=TIMEOUT_S) == 130, command.said()
        assert command.leftovers(grace_s=5.0) == []
    finally:
        command.kill()
    (version,) = Run.latest(directory).checkpoints()
    assert version >= 1
    assert balance(command.stdout)["trained"] == 8 * version


def test_a_role_that_finds_no_coordinator_says_so_by_its_status(tmp_path: Path) -> None:
    words = ["env", "--join", f"tcp://127.0.0.1:{free_port()}", "--join-timeout", "1"]
    ended = ran("coordinator.commands.start", *words, directory=tmp_path, timeout_s=120.0)
    assert (ended.status, ended.leftovers) == (3, []), ended
    assert "is a coordinator listening at" in ended.stderr


def test_a_coordinator_tells_its_supervisor_when_it_can_be_joined_and_that_it_ends(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(TIMEOUT_S)
        words = [sys.executable, "-m", "coordinator.commands.start", "coordinator", str(FROZENLAKE), *SHORT]
        command = Command("coordinator", words, tmp_path, {"NOTIFY_SOCKET": str(tmp_path / "notify")})
        try:
            ready = supervisor.recv(4096).decode()
            assert re.fullmatch(r"READY=1\nSTATUS=run \S+-frozenlake listens at tcp://127\.0\.0\.1:\d+", ready), ready
            command.send(signal.SIGTERM)
            heard = supervisor.recv(4096).decode()
            while heard == "WATCHDOG=1":
                heard = supervisor.recv(4096).decode()
            assert re.fullmatch(r"STOPPING=1\nSTATUS=run \S+-frozenlake ends: .+", heard), heard
            assert command.wait(timeout_s=60.0) == 130, command.said()
        finally:
            command.kill()
    (tmp_path / "notify").unlink()
    assert command.leftovers() == []
