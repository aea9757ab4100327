"""Each limit that cgroup v2 offers, exceeded by a child, in a Linux of its own with a true cgroup v2 (User-Mode Linux
on this host's files): the kernel must have stopped it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.support.running import ROOT

LINUX = shutil.which("linux.uml")
BOOT_S = 900.0  # eight seconds on a machine that has nothing else to do

# The group in which the commands run is not the root, so that they must make way in it before they can limit children.
INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH={root} PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for controller in cpu memory pids io; do echo +$controller >/sys/fs/cgroup/cgroup.subtree_control; done
mkdir /sys/fs/cgroup/delegated
echo $$ >/sys/fs/cgroup/delegated/cgroup.procs
{python} -m tests.resources.inside /dev/ubda >{folder}/found.json 2>{folder}/errors
sync
echo o >/proc/sysrq-trigger
sleep 60
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if LINUX is None:
        pytest.skip("user-mode-linux is not installed: no kernel with a cgroup v2 of its own")
    folder = tmp_path_factory.mktemp("uml")
    init = folder / "init"
    init.write_text(INIT.format(root=ROOT, python=sys.executable, folder=folder))
    init.chmod(0o755)
    with (folder / "image").open("wb") as image:
        image.truncate(64 << 20)
    words = [LINUX, "mem=384M", "root=/dev/root", "rootfstype=hostfs", "rw", f"init={init}", f"ubd0={folder / 'image'}"]
    words += ["con=null", "con0=null,fd:1", "quiet", f"uml_dir={folder}/"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, check=False, timeout=BOOT_S, stdin=subprocess.DEVNULL)
    result = folder / "found.json"
    if not result.exists() or not result.stat().st_size:
        errors = folder / "errors"
        said = errors.read_text() if errors.exists() else done.stdout.decode(errors="replace")[-2000:]
        pytest.fail(f"nothing came out of the machine: {said}")
    read: dict[str, Any] = json.loads(result.read_text())
    return read


pytestmark = pytest.mark.deep


def test_every_controller_is_there_and_none_was_refused(found: dict[str, Any]) -> None:
    assert found["standing"] == {"group": "/sys/fs/cgroup/delegated", "missing": {}}
    assert [found[name]["refused"] for name in ("memory", "pids", "cpu", "io", "free")] == [{}] * 5
    assert found["home"] == "0::/delegated/rollart-rest"  # the kernel limits children only of groups without processes


def test_memory_beyond_the_limit_ends_the_process(found: dict[str, Any]) -> None:
    """64 MiB allowed, 200 touched."""
    assert found["memory"]["counted"]["memory.max"].strip() == str(64 << 20)
    assert (found["memory"]["status"], found["memory"]["out"]) == (-9, "")
    events = dict(line.split() for line in found["memory"]["counted"]["memory.events"].splitlines())
    assert int(events["oom_kill"]) >= 1


def test_processes_beyond_the_limit_are_refused(found: dict[str, Any]) -> None:
    """8 allowed, itself among them: the eighth fork fails with EAGAIN."""
    assert found["pids"]["out"] == "7 11"
    assert "max 1" in found["pids"]["counted"]["pids.events"]


def test_processor_time_is_cut_to_the_quota(found: dict[str, Any]) -> None:
    """A fifth of one CPU, against a loop that takes whatever it gets."""
    assert float(found["cpu"]["out"]) < 0.3 < float(found["free"]["out"])
    stat = dict(line.split() for line in found["cpu"]["counted"]["cpu.stat"].splitlines())
    assert int(stat["nr_throttled"]) > 0


def test_a_disk_takes_no_more_than_its_rate(found: dict[str, Any]) -> None:
    """4 MiB past the page cache at 1 MiB/s; the first burst is free."""
    assert 0 < float(found["io"]["out"]) < 2 * (1 << 20)
    assert "wbytes=4194304" in found["io"]["counted"]["io.stat"]


def test_nothing_is_left_of_the_groups(found: dict[str, Any]) -> None:
    assert found["left"] == []
