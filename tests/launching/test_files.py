"""The launch files: valid for the servers that take them, and made of commands and options that there are."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bus.security import SecurityError, read_key
from coordinator.commands import start, start_node
from coordinator.job import convert
from coordinator.messages import ROLES
from tests.support.running import ROOT

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def jobs() -> list[dict[str, Any]]:
    return [document for document in documents() if document["kind"] == "Job"]


def test_the_manifests_are_valid_for_a_strict_server() -> None:
    words = [sys.executable, "-m", "kubernetes_validate", "--strict", *map(str, MANIFESTS)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("passed for resource", done.stdout + done.stderr)) == len(documents()) == 10


def test_every_role_has_a_pod_whose_command_would_be_taken() -> None:
    containers = [job["spec"]["template"]["spec"]["containers"][0] for job in jobs()]
    assert {container["name"] for container in containers} == {"coordinator", *ROLES}
    for container in containers:
        script = Path(container["command"][0])
        assert script.parent == Path("/opt/rollart/bin")
        assert (ROOT / "bin" / script.name).is_file()
        parsed = start.parser(container["name"]).parse_args(container["args"])
        assert (parsed.host, str(parsed.key_file)) == ("$(POD_IP)", "/run/rollart/cluster.key")


def test_what_the_pods_mount_and_ask_for_is_there() -> None:
    named = {(document["kind"], document["metadata"]["name"]) for document in documents()}
    assert len(named) == len(documents())
    for job in jobs():
        pod = job["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        parts = [*pod["initContainers"], *pod["containers"]]
        mounts = {mount["name"] for part in parts for mount in part["volumeMounts"]}
        assert mounts == set(volumes)
        assert ("ConfigMap", volumes["job"]["configMap"]["name"]) in named
        assert ("Secret", volumes["key"]["secret"]["secretName"]) in named
        assert ("PersistentVolumeClaim", volumes["runs"]["persistentVolumeClaim"]["claimName"]) in named
        for part in parts:
            assert {"requests", "limits"} <= set(part["resources"])


def test_the_service_finds_the_coordinator_and_the_roles_look_for_it() -> None:
    (service,) = [document for document in documents() if document["kind"] == "Service"]
    (lead,) = [job for job in jobs() if job["metadata"]["name"] == "rollart-coordinator"]
    labels = lead["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    arguments = lead["spec"]["template"]["spec"]["containers"][0]["args"]
    port = service["spec"]["ports"][0]["port"]
    assert arguments[arguments.index("--port") + 1] == str(port)
    for job in jobs():
        if job["metadata"]["name"] != lead["metadata"]["name"]:
            join = job["spec"]["template"]["spec"]["containers"][0]["args"][1]
            assert join == f"tcp://{service['metadata']['name']}:{port}"


def test_the_job_in_the_config_map_is_one() -> None:
    (config,) = [document for document in documents() if document["kind"] == "ConfigMap"]
    job = convert(yaml.safe_load(config["data"]["job.yaml"]), "job.yaml", [])
    assert (job.name, job.coordinator.start_timeout_s) == ("frozenlake", 900)


def test_the_placeholder_of_the_secret_is_no_key(tmp_path: Path) -> None:
    (secret,) = [document for document in documents() if document["kind"] == "Secret"]
    path = tmp_path / "cluster.key"
    path.write_text(secret["stringData"]["cluster.key"])
    path.chmod(0o600)
    with pytest.raises(SecurityError, match=r"cluster\.key"):
        read_key(path)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_batch_script_is_clean() -> None:
    words = ["shellcheck", str(DEPLOY / "slurm" / "rollart.sbatch")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_batch_script_starts_nodes_with_options_that_there_are() -> None:
    text = (DEPLOY / "slurm" / "rollart.sbatch").read_text()
    assert set(re.findall(r"--(?:coordinator|port|runs|key-file|roles) ", text)) == {
        "--coordinator ",
        "--port ",
        "--runs ",
        "--key-file ",
        "--roles ",
    }
    words = ["--coordinator", "a", "--port", "1", "--runs", "r", "--key-file", "k", "--roles", "0=env"]
    assert start_node.parser().parse_args(["job.yaml", *words]).roles == "0=env"


def test_the_unit_waits_for_readiness_and_its_command_would_be_taken() -> None:
    unit = (DEPLOY / "systemd" / "rollart@.service").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    assert (settings["Type"], settings["NotifyAccess"], settings["RestartPreventExitStatus"]) == ("notify", "main", "2")
    command, *words = shlex.split(settings["ExecStart"])
    for role in ROLES:
        assert (ROOT / "bin" / Path(command.replace("%i", role)).name).is_file()
    parsed = start.parser("env").parse_args(words)
    assert parsed.join == "${ROLLART_JOIN}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a command that is there, since it asks for that."""
    unit = (DEPLOY / "systemd" / "rollart@.service").read_text()
    path = tmp_path / "rollart@env.service"
    path.write_text(unit.replace("/opt/rollart/bin/start-%i", "/bin/true").replace("file:///opt", "file:///"))
    words = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
