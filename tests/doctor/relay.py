"""A server that is far away: what passes in either direction is held up.

with far_away("127.0.0.1:2181", delay_s=0.15) as address:
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def far_away(server: str, *, delay_s: float) -> Iterator[str]:
    """Each piece of data waits ``delay_s`` before it goes on."""
    host, _, port = server.rpartition(":")
    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection((host, int(port)), timeout=30)
                    far.settimeout(None)
                    opened.extend((near, far))
                    for one, other in ((near, far), (far, near)):
                        threading.Thread(target=_copy, args=(one, other, delay_s), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for one in opened:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            time.sleep(delay_s)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
