"""What one process may have: open files, shared memory, locked memory.

Invariant: reads only. What is judged is this process's own limit, which whatever it starts inherits.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from hwprobe.doctor.findings import Examined
from hwprobe.sysfs import entries, read_text

FILES = 1024
"""What distributions give by default, and enough for one host."""

MANY_FILES = 4096
"""For a control process that has a hundred nodes connected: two sockets each, twice."""

FULL_SHARE = 0.9
SHM_FREE, SHM_SIZE = 64 << 20, 1 << 30
MIB = 1 << 20


def look_files(proc: Path = Path("/proc")) -> Examined:
    """Descriptors: of a process, and of the whole host."""
    examined = Examined()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        enough = hard == resource.RLIM_INFINITY or hard >= MANY_FILES
        examined.error(
            "open files",
            f"expected at least {FILES} for a process, found {soft} (hard limit {_limit(hard)})",
            "every connection, log and object in shared memory takes one; a run ends with 'Too many open files'",
            f"ulimit -n {MANY_FILES}"
            if enough
            else f"LimitNOFILE={MANY_FILES} in the service, nofile in /etc/security/limits.conf, or --ulimit nofile "
            "for a container",
        )
    words = (read_text(proc / "sys" / "fs" / "file-nr") or "").split()
    if len(words) == 3 and all(word.isdigit() for word in words) and int(words[0]) > FULL_SHARE * int(words[2]):
        examined.error(
            "fs.file-nr",
            f"{words[0]} of the host's {words[2]} file descriptors are in use",
            "some process leaks them, or the host's limit is low",
            "find who has most (ls /proc/*/fd | wc -l for each), or raise fs.file-max",
        )
    examined.note(f"{soft} files for a process (hard limit {_limit(hard)})")
    return examined


def look_memory(shm: Path = Path("/dev/shm"), sysfs: Path = Path("/sys"), gpus: bool = False) -> Examined:
    """Shared memory, and where there are RDMA adapters, locked memory. ``gpus``: there are several, whose processes
    talk over shared memory."""
    examined = Examined()
    _shared(shm, gpus, examined)
    _locked(sysfs, examined)
    return examined


def _shared(shm: Path, gpus: bool, examined: Examined) -> None:
    try:
        facts = os.statvfs(shm)
    except OSError as error:
        examined.warning(
            str(shm),
            f"cannot be looked at: {error.strerror}",
            "there is no shared memory: engines and NCCL cannot start their processes",
            f"mount -t tmpfs tmpfs {shm}",
        )
        return
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    if free < min(SHM_FREE, size or SHM_FREE):
        _nearly_full(shm, size, free, examined)
    elif gpus and size < SHM_SIZE:
        examined.warning(
            str(shm),
            f"expected {SHM_SIZE // MIB} MiB where several GPUs work together, found {size // MIB} MiB",
            "a container has 64 MiB by default; NCCL and engines of several processes need more",
            "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium: Memory)",
        )
    else:
        examined.note(f"{shm}: {free // MIB} of {size // MIB} MiB free")


def _nearly_full(shm: Path, size: int, free: int, examined: Examined) -> None:
    if size <= SHM_FREE and free >= size // 2:
        examined.note(f"{shm}: {free // MIB} of {size // MIB} MiB free")
        return
    examined.error(
        str(shm),
        f"expected {SHM_FREE // MIB} MiB free, found {free // MIB} of {size // MIB} MiB",
        "what dead processes have left there, or others use; engines that cannot write there are killed (bus error)",
        f"see what is in {shm} and whose it is (fuser {shm}/*), remove what nobody has open, or make it larger: "
        f"mount -o remount,size=8g {shm}",
    )


def _locked(sysfs: Path, examined: Examined) -> None:
    adapters = [path.name for path in entries(sysfs / "class" / "infiniband")]
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if adapters and soft != resource.RLIM_INFINITY:
        examined.error(
            "locked memory",
            f"expected no limit where there are RDMA adapters ({', '.join(adapters)}), found {soft // 1024} KiB "
            f"(hard limit {_limit(hard)})",
            "memory that RDMA transfers use is registered, that is, locked; registering more than that fails",
            "ulimit -l unlimited; LimitMEMLOCK=infinity in the service, --ulimit memlock=-1 for a container",
        )


def _limit(number: int) -> str:
    return "none" if number == resource.RLIM_INFINITY else str(number)
