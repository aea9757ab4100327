"""One command after the other, wherever it comes from: a prompt, a script, or the words after ``bin/admin``.

Invariant: what may cost something happens only after a yes: from the person at the terminal, or said beforehand
(``--yes``). Where neither can be had it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from coordinator.shell import catalogue
from coordinator.shell.connection import Connection, ShellError
from coordinator.shell.text import text

Confirm = Callable[[str], Awaitable[bool]]


class Shell:
    """Carries out commands; answers are text for people, or JSON."""

    def __init__(
        self, run: Connection, *, as_json: bool, say: Callable[[str], None], confirm: Confirm | None, yes: bool = False
    ) -> None:
        """``confirm``: how to ask the person at the terminal; None where there is nobody."""
        self.run = run
        self._as_json = as_json
        self._say = say
        self._confirm = confirm
        self._yes = yes

    async def carry_out(self, words: Sequence[str]) -> None:
        """Raises ``ShellError``: for what is no command, and where the run does not answer."""
        command, arguments = catalogue.find(words)
        await self._ask_first(command, arguments, words)
        work: Any = command.work(self.run, *arguments)
        if inspect.isawaitable(work):
            self._show(await work)
            return
        async with aclosing(work) as answers:
            async for answer in answers:
                self._show(answer)

    async def _ask_first(self, command: catalogue.Command, arguments: list[str], words: Sequence[str]) -> None:
        if self._yes:
            return
        danger = command.danger if isinstance(command.danger, str) else await command.danger(self.run, *arguments)
        if not danger:
            return
        if self._confirm is None:
            raise ShellError(f"{' '.join(words)}: {danger}; without a terminal to ask at, say --yes")
        if not await self._confirm(f"{' '.join(words)}: {danger}. Go on?"):
            raise ShellError("nothing was changed")

    def _show(self, answer: msgspec.Struct) -> None:
        self._say(msgspec.json.encode(answer).decode() if self._as_json else text(answer))
