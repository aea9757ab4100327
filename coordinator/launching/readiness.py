"""Tell whoever supervises this process that it is ready, alive, or about to end: systemd, Kubernetes, a script.

Invariant: nothing here waits, and nobody who listens badly can hurt the run. What is said goes

- to the datagram socket that NOTIFY_SOCKET names, as ``sd_notify(3)`` would send it (READY=1, STATUS=, WATCHDOG=1,
  STOPPING=1); an address that begins with @ is abstract;
- into the file that ROLLART_READY_FILE names: there while the process is ready, its time renewed as long as the event
  loop turns. A probe asks for its presence, one of liveness for its age.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

NOTIFY_SOCKET = "NOTIFY_SOCKET"
READY_FILE = "ROLLART_READY_FILE"
BEAT_S = 5.0
"""How often the file's time is renewed; systemd's watchdog, where it is set, is fed twice within its time."""


def tell_ready(status: str, environ: Mapping[str, str] = os.environ) -> None:
    """From now on this process can be used."""
    _notify(environ, f"READY=1\nSTATUS={status}")
    path = environ.get(READY_FILE)
    if path:
        try:
            Path(path).write_text(f"{os.getpid()} {status}\n")
        except OSError as error:
            log.warning("%s=%s: cannot be written: %s", READY_FILE, path, error)


def tell_stopping(status: str, environ: Mapping[str, str] = os.environ) -> None:
    """It winds up: nobody should wait for it, nor take it for hung."""
    _notify(environ, f"STOPPING=1\nSTATUS={status}")
    path = environ.get(READY_FILE)
    if path:
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s=%s: cannot be removed: %s", READY_FILE, path, error)


async def keep_telling(environ: Mapping[str, str] = os.environ) -> None:
    """Say so as long as the event loop turns; runs until it is cancelled."""
    interval_s = _interval_s(environ)
    while True:
        await asyncio.sleep(interval_s)
        _notify(environ, "WATCHDOG=1")
        _renew(environ)


def _interval_s(environ: Mapping[str, str]) -> float:
    """``sd_watchdog_enabled(3)``: WATCHDOG_USEC is after how long a silent service is ended."""
    try:
        watchdog_s = int(environ.get("WATCHDOG_USEC", "")) / 1e6
    except ValueError:
        return BEAT_S
    return min(BEAT_S, watchdog_s / 2) if watchdog_s > 0 else BEAT_S


def _notify(environ: Mapping[str, str], text: str) -> None:
    address = environ.get(NOTIFY_SOCKET, "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            notify.setblocking(False)
            notify.sendto(text.encode(), address)
    except OSError as error:  # a supervisor that has gone must not end the run
        log.warning("%s: not told %s: %s", NOTIFY_SOCKET, text.partition("\n")[0], error)


def _renew(environ: Mapping[str, str]) -> None:
    path = environ.get(READY_FILE)
    if not path:
        return
    try:
        os.utime(path)
    except OSError as error:  # removed: this process is stopping, or somebody else did it
        log.debug("%s=%s: not renewed: %s", READY_FILE, path, error)
