"""The shell's prompt: a line editor with completion and history.

Invariant: the prompt outlives every command. Ctrl-C ends the line that is being written, or the command that runs;
Ctrl-D on an empty line, ``quit`` or ``exit`` end the shell.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncGenerator, Coroutine, Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory

from coordinator.shell.completing import Names, candidates
from coordinator.shell.connection import ShellError
from coordinator.shell.shell import Shell

GREETING = "'help' lists the commands, Tab completes, Ctrl-D ends."


def history_file() -> Path:
    """Where lines are kept between sessions; only their owner reads it."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(base) / "rollart" / "admin_history"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    return path


async def confirm(question: str) -> bool:
    """Only a yes is one; whatever else is typed, Ctrl-C and Ctrl-D are none."""
    session: PromptSession[str] = PromptSession()
    try:
        answer = await session.prompt_async(f"{question} [yes/no] ")
    except (KeyboardInterrupt, EOFError):
        return False
    return answer.strip().lower() in ("y", "yes")


class _Completer(Completer):
    def __init__(self, names: Names) -> None:
        self._names = names

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        return ()  # the asynchronous way, below, is the one that a prompt on an event loop takes

    async def get_completions_async(
        self, document: Document, complete_event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        for word, start, meaning in await candidates(document.text_before_cursor, self._names):
            yield Completion(word, start_position=-start, display_meta=meaning)


async def prompt(shell: Shell) -> int:
    """Read and carry out lines until the end; returns the exit status."""
    session: PromptSession[str] = PromptSession(
        "admin> ",
        history=FileHistory(str(history_file())),
        completer=_Completer(Names(shell.run)),
        complete_while_typing=False,
        enable_history_search=True,
    )
    print(f"{shell.run.target.name}: {GREETING}")
    while True:
        try:
            line = await session.prompt_async()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return 0
        if line.strip() in ("quit", "exit"):
            return 0
        await interruptible(_one(shell, line))


async def _one(shell: Shell, line: str) -> None:
    try:
        if words := shlex.split(line):
            await shell.carry_out(words)
    except (ShellError, ValueError) as error:
        print(f"error: {error}")


async def interruptible(work: Coroutine[object, object, None]) -> None:
    """Run something that Ctrl-C ends; the program goes on."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if not task.cancelled():
        task.result()
    else:
        print("\ninterrupted")
