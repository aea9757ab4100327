"""Bandwidth between this host's GPUs, by NVIDIA's own test where it is installed (``all_reduce_perf`` of nccl-tests).

Invariant: the test runs only where there are two GPUs or more, and for ``LIMIT_S`` at most; it is killed then.

Source: github.com/NVIDIA/nccl-tests (doc/PERFORMANCE.md: bus bandwidth).
"""

from __future__ import annotations

import re
import shutil
import subprocess

from hwprobe.doctor.findings import Examined, Unable

COMMAND = "all_reduce_perf"
LIMIT_S = 60.0
LINKED_GB_S = 100.0
"""Between what PCIe carries (below 50 GB/s) and a bridge of NVLinks between two cards (200 GB/s and more)."""


def look(gpus: int, linked: bool) -> Examined:
    """``linked``: NVLink connects them. Raises ``Unable``."""
    if gpus < 2:
        raise Unable(f"it takes two GPUs, found {gpus}")
    program = shutil.which(COMMAND)
    if program is None:
        raise Unable(f"{COMMAND} is not installed (nccl-tests)")
    words = [program, "-b", "128M", "-e", "128M", "-n", "5", "-w", "2", "-g", str(gpus)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return _hung()
    return judge(done.stdout, done.stderr, done.returncode, linked)


def judge(text: str, error: str, status: int, linked: bool) -> Examined:
    """What the test printed."""
    examined = Examined()
    wrong = re.search(r"Out of bounds values\s*:\s*(\d+)", text)
    speed = re.search(r"Avg bus bandwidth\s*:\s*([0-9.]+)", text)
    if wrong is not None and int(wrong[1]):
        examined.error(
            "GPUs",
            f"{wrong[1]} wrong values in an all-reduce",
            "a GPU, its memory or a link between two GPUs returns wrong data",
            "look at gpus (ECC, Xid) and at nvidia-smi nvlink -e; take the GPU out of use",
        )
    if status or speed is None:
        last = (error.strip() or text.strip() or "nothing").splitlines()[-1]
        examined.error(
            "GPUs",
            f"{COMMAND} ended with {status}: {last[:200]}",
            "NCCL cannot connect these GPUs",
            f"run {COMMAND} with NCCL_DEBUG=INFO and read what it says last",
        )
        return examined
    found = float(speed[1])
    if linked and found < LINKED_GB_S:
        examined.warning(
            "GPUs",
            f"expected {LINKED_GB_S:g} GB/s or more over NVLink, found {found:g} GB/s",
            "the data does not take NVLink (NCCL_P2P_DISABLE is set, links are down), or the GPUs are busy",
            "unset NCCL_P2P_DISABLE; nvidia-smi nvlink -s; look again while nothing runs on them",
        )
    else:
        examined.note(f"all-reduce: {found:g} GB/s")
    return examined


def _hung() -> Examined:
    examined = Examined()
    examined.error(
        "GPUs",
        f"{COMMAND} did not end within {LIMIT_S:g} s",
        "a GPU hangs, or two of them cannot reach each other",
        f"look at gpus (Xid); run {COMMAND} with NCCL_DEBUG=INFO",
    )
    return examined
