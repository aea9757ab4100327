"""Limits, ports and disks of this host: each one made too small for real."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hwprobe.doctor import Examined, Finding, disks, limits, ports
from tests.doctor.conftest import Mount
from tests.doctor.preloads import preload
from tests.support.machines import Machine
from tests.support.namespaces import within
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
NOBODY = 65534

LIMITED = """
import resource, sys
from pathlib import Path
import msgspec
from hwprobe.doctor import limits
what, sysfs = sys.argv[1:]
number = {"files": resource.RLIMIT_NOFILE, "locked": resource.RLIMIT_MEMLOCK}[what]
resource.setrlimit(number, (200, resource.getrlimit(number)[1]))
found = limits.look_files() if what == "files" else limits.look_memory(sysfs=Path(sysfs))
sys.stdout.buffer.write(msgspec.json.encode(found.findings))
"""

LOOKED_AT = """
import os, sys
from pathlib import Path
import msgspec
from hwprobe.doctor import disks
place, *user = sys.argv[1:]
for number in map(int, user):
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)
sys.stdout.buffer.write(msgspec.json.encode(disks.look({Path(place): 0}).findings))
"""


def limited(what: str, sysfs: Path) -> list[Finding]:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, what, str(sysfs)], cwd=ROOT, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=list[Finding])


def test_a_process_with_few_files_is_told_how_to_have_more(tmp_path: Path) -> None:
    (finding,) = limited("files", tmp_path)
    assert finding.severity == "error"
    assert finding.evidence.startswith("expected at least 1024 for a process, found 200 (hard limit ")
    assert "4096" in finding.remedy


def test_as_many_files_as_a_distribution_gives_are_enough() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        assert limits.look_files().findings == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_host_that_runs_out_of_descriptors_is_found(tmp_path: Path) -> None:
    (tmp_path / "sys" / "fs").mkdir(parents=True)
    (tmp_path / "sys" / "fs" / "file-nr").write_text("95000\t0\t100000\n")
    findings = limits.look_files(tmp_path).findings
    assert [finding.evidence for finding in findings if finding.subject == "fs.file-nr"] == [
        "95000 of the host's 100000 file descriptors are in use"
    ]


def test_locked_memory_matters_only_beside_rdma_adapters(tmp_path: Path) -> None:
    assert [one for one in limited("locked", tmp_path) if one.subject == "locked memory"] == []
    (tmp_path / "class" / "infiniband" / "mlx5_0").mkdir(parents=True)
    (finding,) = [one for one in limited("locked", tmp_path) if one.subject == "locked memory"]
    assert "mlx5_0" in finding.evidence
    assert finding.remedy.startswith("ulimit -l unlimited")


def test_shared_memory_that_is_full_is_an_error(small_disk: Mount) -> None:
    shm = small_disk("size=80m")
    assert limits.look_memory(shm).findings == []
    (shm / "psm_left").write_bytes(bytes(70 * MIB))
    (finding,) = limits.look_memory(shm).findings
    assert (finding.severity, finding.subject) == ("error", str(shm))
    assert finding.evidence == "expected 64 MiB free, found 10 of 80 MiB"
    (shm / "psm_left").unlink()  # the remedy
    assert limits.look_memory(shm).findings == []


def test_what_a_container_has_by_default_is_too_little_for_several_gpus_only(small_disk: Mount) -> None:
    shm = small_disk("size=64m")
    assert limits.look_memory(shm).findings == []
    (finding,) = limits.look_memory(shm, gpus=True).findings
    assert (finding.severity, finding.evidence) == (
        "warning",
        "expected 1024 MiB where several GPUs work together, found 64 MiB",
    )
    assert "--shm-size" in finding.remedy


def test_without_shared_memory_engines_cannot_start(tmp_path: Path) -> None:
    (finding,) = limits.look_memory(tmp_path / "shm").findings
    assert finding.remedy == f"mount -t tmpfs tmpfs {tmp_path / 'shm'}"


def test_a_port_that_is_taken_names_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [one for one in ports.look([port]).findings if one.subject == f"port {port}"]
    (finding,) = found
    assert f"process {os.getpid()} (" in finding.cause
    assert ports.look([port]).findings == []


def test_an_address_of_another_host_cannot_be_listened_at() -> None:
    (finding,) = ports.look([free_port()], "192.0.2.1").findings
    assert finding.cause == "192.0.2.1 is no address of this host"


def test_too_few_ports_for_connections_are_found(pair: tuple[Machine, Machine]) -> None:
    place = Path("/proc/sys/net/ipv4/ip_local_port_range")
    assert within(pair[0].name, lambda: ports.look([])).findings == []
    within(pair[0].name, lambda: place.write_text("60000 60999"))
    (finding,) = within(pair[0].name, lambda: ports.look([])).findings
    assert "found 1000 (60000 to 60999)" in finding.evidence


def test_ports_that_are_nearly_all_in_use_are_found_and_more_of_them_help(
    pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    machine, _ = pair
    (tmp_path / "sys").symlink_to("/proc/sys")
    (tmp_path / "net").symlink_to("/proc/thread-self/net")  # of the namespace that a thread has entered
    place = Path("/proc/sys/net/ipv4/ip_local_port_range")

    def found() -> list[Finding]:
        return within(machine.name, lambda: ports.look([], proc=tmp_path).findings)

    within(machine.name, lambda: place.write_text("30000 34095"))
    assert found() == []
    within(machine.name, lambda: connections(machine.address, 3400))
    (finding,) = found()
    assert finding.evidence.endswith(" connections for 4096 ports (30000 to 34095)")
    assert 3400 <= int(finding.evidence.split()[0]) <= 3420
    assert "widen net.ipv4.ip_local_port_range" in finding.remedy
    within(machine.name, lambda: place.write_text("30000 60999"))
    assert found() == []


def connections(address: str, number: int) -> None:
    """Made and ended: each keeps its port for a minute (TIME_WAIT)."""
    with socket.create_server((address, 0)) as server:
        for _ in range(number):
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
            near.close()
            far.close()


def look(path: Path, room: int) -> Examined:
    return disks.look({path: room})


def test_a_full_disk_is_an_error_and_a_nearly_full_one_a_warning(small_disk: Mount) -> None:
    disk = small_disk("size=100m")
    assert look(disk / "runs" / "of" / "mine", 90 * MIB).findings == []  # judged by where it would be made
    (finding,) = look(disk, 200 * MIB).findings
    assert (finding.severity, finding.evidence) == ("warning", "expected 200 MiB free, found 100 of 100 MiB")
    (disk / "checkpoint").write_bytes(bytes(95 * MIB))
    (finding,) = look(disk, 90 * MIB).findings
    assert (finding.severity, finding.subject) == ("error", str(disk))
    (disk / "checkpoint").unlink()  # the remedy
    assert look(disk, 90 * MIB).findings == []
    assert list(disk.iterdir()) == []


def test_a_disk_without_inodes_is_an_error(small_disk: Mount) -> None:
    (finding,) = look(small_disk("size=10m,nr_inodes=50"), MIB).findings
    assert "inodes" in finding.evidence


def test_a_disk_that_cannot_be_written_is_an_error(small_disk: Mount) -> None:
    (finding,) = look(small_disk("size=10m,ro"), MIB).findings
    assert finding.severity == "error"
    assert "Read-only file system" in finding.evidence


def test_a_disk_on_which_everything_arrives_late_is_found(tmp_path: Path) -> None:
    place = tmp_path / "runs"
    place.mkdir()
    (finding,) = looked_at(place, environment=preload("slow_disk", tmp_path) | {"SLOW_DISK_MS": "1100"})
    assert (finding.severity, finding.subject) == ("warning", str(place))
    assert float(finding.evidence.split("it took ")[1].split()[0]) >= 1.1
    assert "put runs on a local disk (--runs)" in finding.remedy
    assert looked_at(place) == []


def test_a_directory_of_somebody_else_is_an_error(tmp_path: Path, needs_root: None) -> None:
    place = Path(tempfile.mkdtemp())  # one that everybody may enter leads there
    try:
        place.chmod(0o755)
        (finding,) = looked_at(place, user=NOBODY)
    finally:
        place.rmdir()
    assert (finding.severity, finding.evidence) == ("error", "1 MiB cannot be written there: Permission denied")
    assert finding.cause == "it is mounted read-only, or belongs to somebody else"


def looked_at(place: Path, user: int | None = None, environment: Mapping[str, str] | None = None) -> list[Finding]:
    """By another process, and another user."""
    words = [sys.executable, "-c", LOOKED_AT, str(place), *([] if user is None else [str(user)])]
    environ = {**os.environ, **(environment or {})}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=list[Finding])


def test_a_disk_with_room_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    examined = look(tmp_path, 0)
    assert examined.findings == []
    assert "1 MiB is on the disk in" in examined.notes[0]
    assert list(tmp_path.iterdir()) == []
