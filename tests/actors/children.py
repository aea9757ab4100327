"""What test processes do: ``python -m tests.actors.children HOW`` or ``... '<ChildSpec>'``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.core import Actor, handler
from actors.core.hosting import ChildContext, Finish, read_settings, run_child
from actors.core.launch import die_with_parent
from actors.core.pool import MemberReady, Welcome
from actors.core.process import start_child
from tests.actors.support import Add, Array, Count, Total


class Die(msgspec.Struct):
    """At once, with these last words."""

    words: str
    status: int = 7


class Hang(msgspec.Struct):
    """The whole process, from now on."""


class Pid(msgspec.Struct):
    value: int


class WhichPid(msgspec.Struct):
    """Of the process."""


class ChildSettings(msgspec.Struct, frozen=True):
    how: str = "serve"
    pool: str = ""
    file: str = ""


class Worker(Actor):
    """Lives in a child process."""

    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self, message: Add) -> Total:
        self.total += message.amount
        return Total(self.total)

    @handler
    async def double(self, message: Array) -> Array:
        return Array(message.data * np.asarray(2, message.data.dtype))

    @handler
    async def count(self, message: Count) -> Any:
        for value in range(message.upto):
            yield Total(value)

    @handler
    async def which(self, message: WhichPid) -> Pid:
        return Pid(os.getpid())

    @handler
    async def die(self, message: Die) -> None:
        print(message.words, file=sys.stderr, flush=True)
        os._exit(message.status)

    @handler
    async def hang(self, message: Hang) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


async def work(context: ChildContext) -> Finish:
    settings = read_settings(context.spec, ChildSettings)
    if settings.how == "fail to start":
        raise ValueError("no such\nthing")
    if settings.how == "start for ever":
        write(settings.file, b"starting")
        await asyncio.Event().wait()
    ref = await context.node.spawn(Worker, "worker")
    if settings.pool:
        ready = MemberReady(context.spec.name, ref)
        await context.node.ask(context.parent(settings.pool), ready, Welcome, timeout_s=30, retries=3)
    if settings.how == "fail later":
        asyncio.get_running_loop().call_later(0.05, context.fail, RuntimeError("the device is gone"))
    if settings.how == "fail with a hung thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
        context.fail(RuntimeError("stuck"))
    if settings.file:
        write(settings.file, msgspec.json.encode(ref))

    async def finish() -> None:
        if settings.how == "serve":
            print("finished", file=sys.stderr, flush=True)

    return finish


def write(file: str, content: bytes) -> None:
    """All of it at once, for whoever waits for the file."""
    partial = Path(file + ".partial")
    partial.write_bytes(content)
    partial.rename(file)


def main() -> int:
    """Simple processes, for what needs no node."""
    how, *arguments = sys.argv[1:]
    if how == "sleep":
        die_with_parent()
        write(arguments[0], str(os.getpid()).encode())
        time.sleep(600)
    elif how == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write(arguments[0], str(os.getpid()).encode())
        time.sleep(600)
    elif how == "say":
        print("\n".join(arguments[1:]), flush=True)
        return int(arguments[0])
    elif how == "signal":
        os.kill(os.getpid(), int(arguments[0]))
    elif how == "report":
        facts = {"path": sys.path, "session": os.getsid(0), "pid": os.getpid(), "environment": dict(os.environ)}
        print(json.dumps(facts), flush=True)
    elif how == "with a child of its own":
        own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        write(arguments[0], str(own.pid).encode())
        time.sleep(600)
    elif how == "parent":
        asyncio.run(_parent(*arguments))
    return 0


async def _parent(child_file: str, how: str) -> None:
    """Starts a child, then waits."""
    module, arguments = "tests.actors.children", ["sleep", child_file]
    if how == "wait for an import":
        module, arguments = "tests.actors.slow_import", [child_file]
    await start_child("child", module, arguments, log_path=Path(child_file + ".log"))
    if how.startswith("wait"):
        await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(run_child(work) if sys.argv[1].startswith("{") else main())
