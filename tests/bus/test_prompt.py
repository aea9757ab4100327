"""What a task waits at and goes on from at once."""

from __future__ import annotations

import asyncio

import pytest

from bus.prompt import Prompt


async def waiting(prompt: Prompt[int], said: list[object]) -> None:
    said.append("waits")
    try:
        said.append(await prompt)
    except asyncio.CancelledError:
        said.append("cancelled")
        raise


async def begun(prompt: Prompt[int], said: list[object]) -> asyncio.Task[None]:
    task = asyncio.create_task(waiting(prompt, said))
    await asyncio.sleep(0)
    return task


async def test_the_task_goes_on_within_the_call_that_settles_it() -> None:
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    said: list[object] = []
    task = await begun(prompt, said)

    def settle() -> None:
        prompt.settle(7, at_once=True)
        said.append("settled")

    asyncio.get_running_loop().call_soon(settle)
    await task
    assert said == ["waits", 7, "settled"]


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_task_that_runs_is_not_interrupted_by_the_one_that_waited(at_once: bool) -> None:
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    said: list[object] = []
    task = await begun(prompt, said)
    prompt.settle(7, at_once=at_once)
    said.append("settled")
    await task
    assert said == ["waits", "settled", 7]


async def test_the_task_sees_itself_and_its_timeouts() -> None:
    loop = asyncio.get_running_loop()
    prompt: Prompt[int] = Prompt(loop)
    seen: list[object] = []

    async def work() -> None:
        await prompt
        seen.append(asyncio.current_task())
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("timeout")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    loop.call_soon(lambda: prompt.settle(1, at_once=True))
    await task
    assert seen == [task, "timeout"]


async def test_a_cancelled_task_is_cancelled_and_what_comes_later_is_nothing_to_it() -> None:
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    said: list[object] = []
    task = await begun(prompt, said)
    task.cancel()
    assert prompt.cancelled
    prompt.settle(7, at_once=True)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said == ["waits", "cancelled"]


async def test_a_task_that_is_cancelled_once_it_was_settled_is_cancelled_too() -> None:
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    said: list[object] = []
    task = await begun(prompt, said)
    prompt.settle(7, at_once=False)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not prompt.cancelled


async def test_an_error_is_raised_where_it_is_awaited() -> None:
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    task = await begun(prompt, [])
    prompt.fail(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await task


async def test_what_is_settled_already_is_not_waited_for_and_renewed_it_is() -> None:
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    prompt.settle(7, at_once=True)
    assert await prompt == 7
    prompt.renew()
    said: list[object] = []
    task = await begun(prompt, said)
    assert said == ["waits"]
    prompt.settle(8, at_once=False)
    await task
    assert said == ["waits", 8]
