"""Runs tests that are coroutines, and holds them to leaving nothing behind: no task, no error that nobody saw."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Coroutine
from typing import Any

import pytest

from bus import virtual_time

DEADLINE_S = 30.0
"""Of real time; what waits for ever in virtual time is found out by its loop."""


class LeftBehind(AssertionError):
    """What a test did not clean up."""


def run(test: Coroutine[Any, Any, None], *, virtual: bool = False) -> None:
    """Run to the end, in real time within ``DEADLINE_S``, or in virtual time."""
    problems: list[str] = []

    async def guarded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(repr(context)))
        async with asyncio.timeout(None if virtual else DEADLINE_S):
            await test
        await asyncio.sleep(0)
        problems.extend(repr(task) for task in asyncio.all_tasks() - {asyncio.current_task()})
        gc.collect(1)  # futures whose exception nobody saw report it now

    if virtual:
        virtual_time.run(guarded())
    else:
        asyncio.run(guarded())
    if problems:
        raise LeftBehind("\n".join(problems))


def call_if_coroutine(function: pytest.Function) -> bool | None:
    """For ``pytest_pyfunc_call``."""
    if not inspect.iscoroutinefunction(function.obj):
        return None
    names = inspect.signature(function.obj).parameters
    virtual = function.get_closest_marker("virtual_time") is not None
    run(function.obj(**{name: function.funcargs[name] for name in names}), virtual=virtual)
    return True
