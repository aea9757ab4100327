"""How a child process begins: ``python -P PATH/launch.py MODULE ARGUMENTS`` is ``python -m MODULE ARGUMENTS``, bound to
its parent first.

Invariant: nothing of ours, or of others, is imported before the kernel has been asked to kill this process when its
parent ends. What a child imports may take seconds, may hang, and may be stopped in the middle; a parent that is killed
meanwhile must not leave it behind.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Linux only: elsewhere a child notices its parent's
    silence."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get("ROLLART_PARENT")
    if expected is not None and int(expected) != os.getppid():  # it died before the call above
        os._exit(1)


if __name__ == "__main__":
    die_with_parent()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
