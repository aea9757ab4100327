"""Which host gets which roles, and the command lines that come of it; expected values written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.commands import launch, start_node
from coordinator.launching.hostlist import LaunchError, deal, load_hosts, numeric, parse_map

LEADS = ("coordinator", "trainer", "weightsync", "reward")


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts.yaml"
    path.write_text(text)
    return path


def test_roles_are_dealt_out_by_the_number_of_hosts() -> None:
    assert deal(1) == [("coordinator", "proxy", "env", "reward", "trainer", "weightsync")]
    assert deal(2) == [LEADS, ("proxy", "env")]
    assert deal(4) == [LEADS, ("proxy",), ("env",), ("env",)]


def test_a_map_names_hosts_and_ranges() -> None:
    text = "0=coordinator,trainer,weightsync 1=proxy,reward 2-3=env 4-=env"
    lead = ("coordinator", "trainer", "weightsync")
    assert parse_map(text, 6) == [lead, ("proxy", "reward"), ("env",), ("env",), ("env",), ("env",)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0:coordinator", "expected HOSTS=ROLE,ROLE such as 0=coordinator or 2-=env, found '0:coordinator'"),
        ("0=boss", "expected one of coordinator, proxy, env, reward, trainer, weightsync, found 'boss'"),
        ("3=env", "'3=env' names host 3, there are hosts 0 to 1"),
    ],
)
def test_a_map_that_says_nothing_useful_is_refused(text: str, reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        parse_map(text, 2)


@pytest.mark.parametrize(
    ("yaml", "reason"),
    [
        ("hosts: []", r"length >= 1 - at `\$\.hosts`"),
        ("hosts: [{host: a, rolls: [env]}]", r"unknown field `rolls`"),
        ("port: 70000\nhosts: [{host: a}]", r"<= 65535 - at `\$\.port`"),
        ("hosts: [{host: a}, {host: a}]", "expected every host once, found a, a"),
        ("hosts: [{host: a, roles: [coordinator]}, {host: b}]", "no host has the role proxy"),
        (
            "hosts:\n- {host: a, roles: [coordinator, proxy, env, reward, trainer, weightsync]}\n"
            "- {host: b, roles: [proxy, reward]}",
            "the role reward can be on one host, found it on 2",
        ),
        (
            "hosts:\n- {host: a, roles: [proxy, env, reward, trainer, weightsync]}\n- {host: b, roles: [coordinator]}",
            "the coordinator belongs on the first host",
        ),
        ("hosts: [{host: a}, {host: b, spare: true, roles: [env]}]", "b: a spare has no roles until it is wanted"),
        ("hosts: [{host: a, spare: true}]", "every host is a spare"),
    ],
)
def test_a_host_list_that_cannot_work_is_one_line(tmp_path: Path, yaml: str, reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        load_hosts(write(tmp_path, yaml))


def test_a_name_becomes_the_number_to_listen_on() -> None:
    assert numeric("127.0.0.2") == "127.0.0.2"
    assert numeric("localhost") == "127.0.0.1"
    with pytest.raises(LaunchError, match=r"address no-such-host\.invalid: cannot be resolved here"):
        numeric("no-such-host.invalid")


def test_the_shell_gets_one_quoted_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = write(
        tmp_path,
        "key_file: /k/cluster.key\ndirectory: /shared/my work\nstart: /opt/bin/start-{role}\nhosts:\n"
        "- {host: gpu-a, address: 10.0.0.1}\n- {host: gpu-b, address: 10.0.0.2}\n",
    )
    assert launch.main([str(hosts), "a job.yaml", "train.steps=2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "coordinator@gpu-a",
        "trainer@gpu-a",
        "weightsync@gpu-a",
        "reward@gpu-a",
        "proxy@gpu-b",
        "env@gpu-b",
    ]
    parts = launch.plan(load_hosts(hosts), "a job.yaml", ["train.steps=2"], "runs")
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
    assert parts[0].words == [
        *ssh,
        "gpu-a",
        "cd '/shared/my work' && exec /opt/bin/start-coordinator 'a job.yaml' train.steps=2 --port 5600 --runs runs"
        " --host 10.0.0.1 --key-file /k/cluster.key --stop-on-eof",
    ]
    assert parts[5].words == [
        *ssh,
        "gpu-b",
        "cd '/shared/my work' && exec /opt/bin/start-env --join tcp://10.0.0.1:5600 --join-timeout 300"
        " --host 10.0.0.2 --key-file /k/cluster.key --stop-on-eof --name env-1 --beside proxy,env",
    ]


def test_a_run_of_several_proxies_begins_once_all_are_there_unless_its_user_says_otherwise(tmp_path: Path) -> None:
    hosts = load_hosts(
        write(
            tmp_path,
            "hosts:\n- {host: 127.0.0.1, roles: [coordinator, trainer, weightsync, reward, env]}\n"
            "- {host: 127.0.0.2, roles: [proxy]}\n- {host: 127.0.0.3, roles: [proxy]}\n",
        )
    )
    lead, *others = launch.plan(hosts, "job.yaml", ["rollout.proxies=1"], "runs")
    assert " job.yaml rollout.proxies=2 rollout.proxies=1 --port" in lead.words[-1]  # the last one counts
    assert [part.name for part in others if "proxy" in part.name] == ["proxy@127.0.0.2", "proxy@127.0.0.3"]
    words = ["job.yaml", "--coordinator", "127.0.0.1", "--index", "0", "--hosts", "3", "--address", "127.0.0.1"]
    roles = ["--roles", "0=coordinator,trainer,weightsync,reward,env 1-=proxy"]
    (first, *_) = start_node.plan(start_node.parser().parse_args([*words, *roles]), {"ROLLART_START": "s-{role}"})
    assert first.words[:3] == ["s-coordinator", "job.yaml", "rollout.proxies=2"]


def test_beyond_loopback_a_key_is_asked_for_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([str(write(tmp_path, "hosts: [{host: 10.0.0.1}]")), "job.yaml"]) == 2
    assert "error: key_file: 10.0.0.1 is beyond loopback" in capsys.readouterr().err


def test_a_spare_is_dealt_no_role_and_comes_last(tmp_path: Path) -> None:
    hosts = load_hosts(
        write(tmp_path, "hosts:\n- {host: 127.0.0.1}\n- {host: 127.0.0.9, spare: true}\n- {host: 127.0.0.2}\n")
    )
    assert [(host.host, host.roles) for host in hosts.hosts] == [
        ("127.0.0.1", LEADS),
        ("127.0.0.2", ("proxy", "env")),
        ("127.0.0.9", ()),
    ]
    last = launch.plan(hosts, "job.yaml", [], "runs")[-1]
    assert (last.name, last.spare) == ("spare@127.0.0.9", True)
    assert last.words[-1] == (
        "exec bin/start-spare --join tcp://127.0.0.1:5600 --join-timeout 300 --host 127.0.0.9 --stop-on-eof"
        " --name spare-2"
    )


def test_a_node_that_is_started_as_a_spare_has_one_process() -> None:
    words = ["job.yaml", "--coordinator", "127.0.0.1", "--index", "7", "--address", "127.0.0.8", "--spare"]
    (part,) = start_node.plan(start_node.parser().parse_args(words), {"ROLLART_START": "s-{role}"})
    join = ["--join", "tcp://127.0.0.1:5600", "--join-timeout", "300"]
    assert part.words == ["s-spare", *join, "--host", "127.0.0.8", "--stop-on-eof", "--name", "spare-7"]


def test_a_host_finds_its_number_in_what_slurm_says() -> None:
    arguments = start_node.parser().parse_args(["job.yaml", "--coordinator", "127.0.0.1", "--key-file", "k"])
    slurm = {
        "SLURM_NODEID": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "127.0.0.2",
        "ROLLART_START": "s-{role}",
    }
    parts = start_node.plan(arguments, slurm)
    join = ["--join", "tcp://127.0.0.1:5600", "--join-timeout", "300"]
    own = ["--host", "127.0.0.2", "--key-file", "k", "--stop-on-eof"]
    assert [part.words for part in parts] == [
        ["s-proxy", *join, *own, "--name", "proxy-1", "--beside", "proxy,env"],
        ["s-env", *join, *own, "--name", "env-1", "--beside", "proxy,env"],
    ]
    with pytest.raises(LaunchError, match=r"--index: not given, and \$SLURM_NODEID is no number"):
        start_node.plan(arguments, {})
