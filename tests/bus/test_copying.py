"""Copies by several threads: whole, few threads, and an end when nobody waits any more."""

import asyncio
import os
import threading

import numpy as np
import pytest

from bus.objects.copying import PIECE_BYTES, THREAD_BYTES, THREADS, Copier, threads_for


@pytest.mark.parametrize("size", [1, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 1, 2 * THREAD_BYTES + 12_345])
@pytest.mark.parametrize("processors", [1, 2, 3])
async def test_all_is_copied_and_nothing_beside_it(size: int, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.objects.copying._processors", lambda: processors)
    source = np.random.default_rng(size).bytes(size)
    room = bytearray(size + 2)
    await Copier().copy(memoryview(room)[1:-1], memoryview(source))
    assert room[1:-1] == source
    assert (room[0], room[-1]) == (0, 0)


async def test_copies_at_a_time_share_their_threads_and_do_not_mix() -> None:
    sources = [np.random.default_rng(seed).bytes(2 * THREAD_BYTES) for seed in range(4)]
    targets = [bytearray(len(source)) for source in sources]
    copier = Copier()
    await asyncio.gather(
        *(copier.copy(memoryview(into), memoryview(source)) for into, source in zip(targets, sources, strict=True))
    )
    assert targets == sources
    copying = [thread for thread in threading.enumerate() if thread.name.startswith("objects")]
    assert len(copying) <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("size", "processors", "expected"),
    [(32 << 20, 64, 2), (64 << 20, 2, 2), (64 << 20, 64, 4), (1 << 30, 64, THREADS), (1 << 30, 1, 1), (1, 8, 1)],
)
def test_there_are_no_more_threads_than_processors_and_than_the_copy_is_worth(
    size: int, processors: int, expected: int
) -> None:
    assert threads_for(size, processors) == expected


async def test_a_cancelled_copy_takes_no_further_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.objects.copying._processors", lambda: 1)
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    pieces = []

    def slowly(into: np.ndarray, source: np.ndarray) -> None:
        pieces.append(len(source))
        begun.set()
        go_on.wait(10)
        ended.set()

    monkeypatch.setattr("bus.objects.copying.np.copyto", slowly)
    copier, size = Copier(), 4 * PIECE_BYTES
    task = asyncio.create_task(copier.copy(memoryview(bytearray(size)), memoryview(bytes(size))))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 10)
    monkeypatch.undo()
    await copier.copy(memoryview(bytearray(1)), memoryview(b"a"))  # by the same thread, so after that
    assert pieces == [PIECE_BYTES]


async def test_what_a_thread_raises_reaches_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(into: np.ndarray, source: np.ndarray) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr("bus.objects.copying.np.copyto", broken)
    with pytest.raises(MemoryError, match="none left"):
        await Copier().copy(memoryview(bytearray(10)), memoryview(bytes(10)))


async def test_only_as_much_as_there_is_room_for_is_accepted() -> None:
    with pytest.raises(ValueError, match="20 bytes to be copied into 10"):
        await Copier().copy(memoryview(bytearray(10)), memoryview(bytes(20)))
