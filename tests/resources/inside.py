"""Runs as root in a machine with a true cgroup v2 (``test_enforcement``), beside a child that goes beyond each limit;
prints what became of it as JSON. Not a test by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hwprobe.delegation import Groups, Share

MIB = 1 << 20
COUNTED = ("memory.events", "memory.max", "cpu.stat", "pids.events", "io.stat")
WAIT = "import sys; sys.stdin.readline()\n"  # until it has been put into its group

HOG = WAIT + (
    "block = bytearray(200 << 20)\nfor i in range(0, len(block), 4096): block[i] = 1\nprint('kept all', flush=True)"
)
FORKS = WAIT + (
    "import os, time\nmade = 0\ntry:\n    while made < 40:\n        pid = os.fork()\n"
    "        if pid == 0:\n            time.sleep(60); os._exit(0)\n        made += 1\n"
    "except OSError as error:\n    print(made, error.errno, flush=True)\n"
)
SPIN = WAIT + (
    "import time\nbegin, cpu = time.monotonic(), time.process_time()\n"
    "while time.monotonic() - begin < 4: pass\n"
    "print((time.process_time() - cpu) / (time.monotonic() - begin), flush=True)\n"
)
WRITE = WAIT + (
    "import mmap, os, sys, time\nfd = os.open(sys.argv[1], os.O_WRONLY | os.O_DIRECT)\n"
    "block = mmap.mmap(-1, 1 << 18)\nbegin = time.monotonic()\n"
    "for _ in range(16): os.write(fd, block)\n"
    "print((1 << 22) / (time.monotonic() - begin), flush=True)\n"
)


def beside(groups: Groups, name: str, code: str, share: Share, *arguments: str) -> dict[str, Any]:
    """Run a child under a share; what it said, how it ended, and what its group counted."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    refused = groups.confine(name, child.pid, share)
    out, err = child.communicate("go\n", timeout=300)
    group = Path(groups.standing.group or "/") / f"rollart-{os.getpid()}" / name
    counted = {file: (group / file).read_text() for file in COUNTED if (group / file).exists()}
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), 9)
    return {"refused": refused, "status": child.returncode, "out": out.strip(), "err": err[-300:], "counted": counted}


def main(disk: str) -> None:
    groups = Groups()
    found: dict[str, Any] = {"standing": {"group": groups.standing.group, "missing": groups.standing.missing}}
    found["memory"] = beside(groups, "memory", HOG, Share(memory_bytes=64 * MIB))
    found["pids"] = beside(groups, "pids", FORKS, Share(pids=8))
    found["free"] = beside(groups, "free", SPIN, Share(pids=100))
    found["cpu"] = beside(groups, "cpu", SPIN, Share(cpus=0.2))
    found["io"] = beside(groups, "io", WRITE, Share(io_bytes_s=MIB, io_path=disk), disk)
    found["home"] = Path("/proc/self/cgroup").read_text().strip()
    time.sleep(1.0)  # until the killed children are reaped
    found["left"] = groups.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
