"""One of two engines of Mooncake that a test runs, over TCP; its log is what it writes to stderr.

mooncake_peer.py ADDRESS                      prints "PORT START" and is written to, until it is killed
mooncake_peer.py ADDRESS PEER:PORT START      writes there until its input ends; prints what became of each
"""

from __future__ import annotations

import ctypes
import importlib
import select
import sys
import time

PIECE, PIECES = 1 << 20, 8


def main() -> None:
    own, *there = sys.argv[1:]
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    held = (ctypes.c_char * (PIECE * PIECES))()
    start = ctypes.addressof(held)
    if engine.initialize(own, "P2PHANDSHAKE", "tcp", "") or engine.register_memory(start, PIECE * PIECES):
        sys.exit(f"no engine at {own}")
    if not there:
        print(engine.get_rpc_port(), start, flush=True)
        time.sleep(600)
        return
    peer, target = there[0], int(there[1])
    pieces = range(0, PIECE * PIECES, PIECE)
    while not select.select([sys.stdin], [], [], 0)[0]:
        failed = engine.batch_transfer_sync_write(
            peer, [start + at for at in pieces], [target + at for at in pieces], [PIECE] * PIECES
        )
        print("failed" if failed else "done", flush=True)


if __name__ == "__main__":
    main()
