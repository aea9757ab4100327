"""End a process when its standard input does: for launchers whose signals do not arrive (ssh), or who were killed.

Invariant: the end of input is one SIGTERM to this process, nothing else; whoever handles that ends in order.
"""

from __future__ import annotations

import os
import signal
import threading

STDIN = 0


def end_with_input() -> None:
    """Watch standard input from a thread of its own until it ends; what comes in is thrown away."""
    threading.Thread(target=_watch, name="leash", daemon=True).start()


def _watch() -> None:
    try:
        while os.read(STDIN, 4096):
            pass
    except OSError:  # it never was open, or has gone: the same as its end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
