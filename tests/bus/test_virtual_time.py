"""An event loop in virtual time: what asyncio offers, in an order that repeats, and nothing of the real world."""

import asyncio
import itertools
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path

import pytest

import bus.virtual_time
from bus.virtual_time import NotSimulated, Stuck, VirtualLoop, run

ROOT = Path(__file__).parents[2]


def now() -> float:
    return asyncio.get_running_loop().time()


# ---- time ------------------------------------------------------------------------------------------------------------


def test_a_day_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400)
        return now()

    assert run(main()) == 86_400.0


def test_timers_of_one_time_run_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        found: list[int] = []
        order = list(range(100))
        random.Random(3).shuffle(order)
        for number in order:
            asyncio.get_running_loop().call_at(5.0, found.append, number)
        await asyncio.sleep(6)
        return [order.index(number) for number in found]

    assert run(main()) == list(range(100))


def test_what_is_ready_runs_before_time_goes_on() -> None:
    async def main() -> list[str]:
        found: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, found.append, "timer")

        def chain(left: int) -> None:
            found.append(f"ready {left}")
            if left:
                loop.call_soon(chain, left - 1)

        loop.call_at(0.5, chain, 2)
        await asyncio.sleep(2)
        return found

    assert run(main()) == ["ready 2", "ready 1", "ready 0", "timer"]


def test_a_timer_in_the_past_runs_now() -> None:
    async def main() -> float:
        await asyncio.sleep(10)
        done = asyncio.Event()
        asyncio.get_running_loop().call_at(3.0, done.set)
        await done.wait()
        return now()

    assert run(main()) == 10.0


def test_cancelled_timers_neither_run_nor_stay() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        for _ in range(10_000):
            loop.call_later(1e6, pytest.fail, "it was cancelled").cancel()
        await asyncio.sleep(1)
        assert isinstance(loop, VirtualLoop)
        return len(loop._timers)

    assert run(main()) < 3_000


def test_timeouts_queues_locks_and_gather_work() -> None:
    async def main() -> list[object]:
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        lock = asyncio.Lock()
        found: list[object] = []

        async def produce() -> None:
            for number in range(3):
                await queue.put(number)
                await asyncio.sleep(1)

        async def consume() -> None:
            for _ in range(3):
                async with lock:
                    found.append((await queue.get(), now()))

        await asyncio.gather(produce(), consume())
        try:
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        except TimeoutError:
            found.append(now())
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(1))
        found.append(now())
        return found

    assert run(main()) == [(0, 0.0), (1, 1.0), (2, 2.0), 5.5, 6.5]


def test_generators_are_closed_at_the_end() -> None:
    closed: list[float] = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(3)
            closed.append(now())

    async def main() -> int:
        generator = numbers()
        keep.append(generator)
        return await anext(generator)

    keep: list[AsyncGenerator[int, None]] = []
    assert run(main()) == 1
    assert closed == [3.0]


# ---- programs that get nowhere ---------------------------------------------------------------------------------------


def test_a_program_that_waits_for_nothing_is_told_who_waits_where() -> None:
    closed: list[str] = []

    async def idle(queue: asyncio.Queue[int]) -> None:
        try:
            await queue.get()
        finally:
            closed.append("idle")

    async def main() -> None:
        await asyncio.sleep(2)
        task = asyncio.create_task(idle(asyncio.Queue()), name="the idle one")
        await task

    expected = (
        r"nothing is scheduled at 2 s of virtual time, and 2 tasks wait:(.|\n)*the idle one: idle -> get at .*queues.py"
    )
    with pytest.raises(Stuck, match=expected):
        run(main())
    assert closed == ["idle"], "its tasks are ended all the same"


def test_a_program_that_only_goes_on_waiting_ends_at_the_limit() -> None:
    async def beat() -> None:
        for _ in itertools.count():
            await asyncio.sleep(1)

    async def main() -> None:
        beating = asyncio.create_task(beat())
        await asyncio.Event().wait()
        await beating

    with pytest.raises(Stuck, match=r"the limit of 100 s of virtual time has passed at 100 s.*(.|\n)*main -> wait"):
        run(main(), limit_s=100)


def test_a_program_in_which_time_stands_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus.virtual_time, "MAX_STEPS_AT_ONCE", 10_000)

    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="time stands still after 10000 steps at 0 s"):
        run(main())


# ---- the real world --------------------------------------------------------------------------------------------------


async def in_a_thread() -> None:
    await asyncio.to_thread(print)


async def in_a_process() -> None:
    await asyncio.create_subprocess_exec("true")


async def on_a_socket() -> None:
    with socket.socket() as one:
        asyncio.get_running_loop().add_reader(one.fileno(), print)


async def on_a_connection() -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def on_a_signal() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (in_a_thread, "run_in_executor needs an executor"),
        (in_a_process, "subprocess_exec needs a subprocess"),
        (on_a_socket, "add_reader needs a real descriptor"),
        (on_a_connection, "create_connection needs a real descriptor"),
        (on_a_signal, "add_signal_handler needs a signal handler"),
    ],
)
def test_the_real_world_is_refused_by_name(work: Callable[[], Coroutine[None, None, None]], what: str) -> None:
    with pytest.raises(NotSimulated, match=what):
        run(work())


def test_every_way_into_the_real_world_is_refused() -> None:
    """Whatever method a selector loop has and a bare one leaves open must be ours, or refused."""
    real = {name for name in vars(asyncio.selector_events.BaseSelectorEventLoop) if not name.startswith("_")}
    real |= {name for name in vars(asyncio.unix_events._UnixSelectorEventLoop) if not name.startswith("_")}
    assert real - set(vars(VirtualLoop)) == {"close"}


def test_other_threads_are_refused() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        found: list[str] = []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except NotSimulated as error:
                found.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return found

    (error,) = run(main())
    assert "another thread called into a loop in virtual time" in error


# ---- again and again -------------------------------------------------------------------------------------------------

WALK_A_SET = """
import asyncio
from bus.virtual_time import run

async def main():
    ended = []
    async def wait(number):
        try:
            await asyncio.sleep(9)
        finally:
            ended.append(number)
    padding = [object() for _ in range({padding})]
    tasks = {{asyncio.create_task(wait(number)) for number in range(50)}}
    await asyncio.sleep(1)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    print(ended, asyncio.get_running_loop().random.random())

run(main(), seed=5)
"""


def test_sets_of_tasks_are_walked_in_the_same_order_in_every_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", WALK_A_SET.format(padding=seed * 997)],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in range(3)
    }
    assert len(found) == 1


def test_the_seed_is_the_one_source_of_chance() -> None:
    async def draw() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop.random.random()

    assert run(draw(), seed=1) == run(draw(), seed=1) == random.Random(1).random()
    assert run(draw(), seed=2) == random.Random(2).random()
