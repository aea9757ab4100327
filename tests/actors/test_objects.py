"""Objects between real processes and nodes: put, get without a copy, life, and what is refused."""

import asyncio
import fcntl
import gc
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from actors.core import Node, Ref
from actors.core.process import start_child
from actors.tensors import Tensor
from bus.message import DecodeError
from bus.objects import Object, ObjectError, ObjectGone, ObjectStore, ObjectStoreFull
from bus.objects.memory import PrivateMemory
from tests.actors.object_children import Keep, Kept, Look, Looked, Made, Make
from tests.actors.support import until

LARGE = 1 << 20
DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]


class Batch(msgspec.Struct, frozen=True):
    name: str
    tokens: np.ndarray
    scores: np.ndarray


@asynccontextmanager
async def two_nodes(where: str) -> AsyncIterator[tuple[Node, Node]]:
    """An owner and a reader, which can map the owner's memory, or cannot."""
    memory = PrivateMemory() if where == "fetched" else None
    async with Node("owner") as owner, Node("reader", objects=ObjectStore(memory=memory)) as reader:
        yield owner, reader


@asynccontextmanager
async def child(tmp_path: Path, name: str) -> AsyncIterator[tuple[Any, Ref]]:
    """A process with a node and an actor that puts and gets."""
    file = tmp_path / f"{name}.ref"
    module = "tests.actors.object_children"
    started = await start_child(name, module, [name, str(file)], log_path=tmp_path / f"{name}.log")
    try:
        await until(file.exists)
        yield started, msgspec.json.decode(file.read_bytes(), type=Ref)
    finally:
        started.kill()
        await started.stop()


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def count(node: Node, name: str) -> int:
    return node.description().counters.get(name, 0)


# ---- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["mapped", "fetched"])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_an_array_of_every_dtype_comes_back_as_it_was(where: str, dtype: str) -> None:
    values = (np.arange(LARGE // 8) % 2).astype(dtype).reshape(2, -1)
    async with two_nodes(where) as (owner, reader):
        handle = await owner.put(values)
        got = await reader.get(handle, np.ndarray, timeout_s=10)
        assert got.dtype == values.dtype
        assert np.array_equal(got, values)
        assert not got.flags.writeable
        assert count(reader, "objects_got_local" if where == "mapped" else "objects_got_remote") == (
            values.nbytes > 65_000
        )
        del got


@pytest.mark.parametrize("where", ["mapped", "fetched"])
@pytest.mark.parametrize("size", [0, 1, 5_000, 65_536, 65_537, 9_000_001])
async def test_bytes_of_every_size_come_back(where: str, size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    async with two_nodes(where) as (owner, reader):
        handle = await owner.put(bytearray(content))
        assert handle.size == size
        assert await reader.get(handle, bytes, timeout_s=10) == content
        assert bytes(await owner.get(handle, memoryview, timeout_s=10)) == content


@pytest.mark.parametrize("where", ["mapped", "fetched"])
async def test_torchs_tensors_come_back_in_memory_of_their_own(where: str) -> None:
    weights = torch.arange(LARGE, dtype=torch.float32).to(torch.bfloat16)
    async with two_nodes(where) as (owner, reader):
        handle = await owner.put(weights)
        got = await reader.get(handle, Tensor, timeout_s=10)
        assert torch.equal(got, weights)
        got += 1  # shared memory must not be written to
        assert torch.equal(await reader.get(handle, Tensor, timeout_s=10), weights)


@pytest.mark.parametrize("where", ["mapped", "fetched"])
async def test_a_struct_with_arrays_comes_back_on_its_owner_too(where: str) -> None:
    batch = Batch("seven", np.arange(100_000, dtype=np.int32), np.ones(3, np.float32))
    async with two_nodes(where) as (owner, reader):
        handle = await owner.put(batch)
        for node in (owner, reader):
            got = await node.get(handle, Batch, timeout_s=10)
            assert got.name == "seven"
            assert int(got.tokens.sum()) == 4_999_950_000
            assert got.scores.tolist() == [1.0, 1.0, 1.0]
            del got


async def test_two_gets_read_the_same_memory(tmp_path: Path) -> None:
    async with two_nodes("mapped") as (owner, reader):
        handle = await owner.put(np.zeros(LARGE, np.uint8))
        one = await reader.get(handle, np.ndarray, timeout_s=10)
        other = await reader.get(handle, np.ndarray, timeout_s=10)
        assert one.ctypes.data == other.ctypes.data
        own = await owner.get(handle, np.ndarray, timeout_s=10)
        assert own.ctypes.data != one.ctypes.data, "another mapping"
        same = {line.split()[4] for line in maps() if "rollart-object" in line}
        assert len(same) == 1, "of the same anonymous file"
        del one, other, own


async def test_concurrent_gets_of_another_hosts_object_fetch_it_once() -> None:
    async with two_nodes("fetched") as (owner, reader):
        handle = await owner.put(np.arange(LARGE))
        got = await asyncio.gather(*(reader.get(handle, np.ndarray, timeout_s=10) for _ in range(8)))
        assert count(reader, "objects_got_remote") == 1
        assert all(int(values[-1]) == LARGE - 1 for values in got)
        del got


# ---- between processes -----------------------------------------------------------------------------------------------


async def test_a_handle_in_a_message_is_read_by_another_process_without_a_copy(tmp_path: Path) -> None:
    values = np.arange(8 << 20, dtype=np.float64)  # 64 MB
    async with Node("owner") as node, child(tmp_path, "looker") as (_, ref):
        handle = await node.put(values)
        looked = await node.ask(ref, Look(handle), Looked, timeout_s=20)
        assert looked.total == float((8 << 20) * ((8 << 20) - 1) // 2)
        assert looked.private_bytes < 8 << 20, "what it read is not in its own memory"


async def test_a_reader_survives_its_owners_release_and_the_memory_is_not_used_again(tmp_path: Path) -> None:
    async with Node("owner") as node, child(tmp_path, "looker") as (_, ref):
        handle = await node.put(np.full(LARGE, 7, np.uint8))
        await node.ask(ref, Keep(handle), Kept, timeout_s=20)
        node.release(handle)
        again = [await node.put(np.full(LARGE, 9, np.uint8)) for _ in range(3)]
        assert (await node.ask(ref, Keep(None), Kept, timeout_s=20)).values == [7]
        with pytest.raises(ObjectGone, match="it was released"):
            await node.get(handle, np.ndarray, timeout_s=5)
        assert len(again) == 3


async def test_memory_that_nobody_reads_is_used_again(tmp_path: Path) -> None:
    async with Node("owner") as node, child(tmp_path, "looker") as (_, ref):
        places = set()
        for value in range(5):
            handle = await node.put(np.full(LARGE, value, np.uint8))
            looked = await node.ask(ref, Look(handle), Looked, timeout_s=20)
            assert looked.total == value * LARGE
            places.add(handle.place)
            node.release(handle)
        assert len(places) <= 2, "the reader's lock on the first one may end a moment after its answer came"


async def test_a_killed_reader_keeps_nothing_from_being_used_again(tmp_path: Path) -> None:
    async with Node("owner") as node, child(tmp_path, "looker") as (process, ref):
        handle = await node.put(np.full(LARGE, 7, np.uint8))
        await node.ask(ref, Keep(handle), Kept, timeout_s=20)
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not process.running)
        node.release(handle)
        assert (await node.put(np.full(LARGE, 8, np.uint8))).place == handle.place


async def test_the_objects_of_a_killed_owner_are_gone_at_once_and_leave_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    async with Node("reader") as node, child(tmp_path, "owner") as (process, ref):
        large = await node.ask(ref, Make(LARGE), Made, timeout_s=20)
        small = await node.ask(ref, Make(100), Made, timeout_s=20)
        kept = await node.get(large.handle, np.ndarray, timeout_s=20)
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not process.running)
        for handle in (large.handle, small.handle):
            with pytest.raises(ObjectGone, match="its owner's process has ended"):
                await node.get(handle, np.ndarray, timeout_s=60)
        assert kept.tolist() == [1] * LARGE, "what was got stays"
        assert set(os.listdir("/dev/shm")) <= before
        del kept


async def test_an_owner_that_dies_while_it_is_waited_for_is_noticed(tmp_path: Path) -> None:
    async with Node("reader") as node, child(tmp_path, "owner") as (process, ref):
        small = await node.ask(ref, Make(100), Made, timeout_s=20)
        os.kill(process.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(node.get(small.handle, np.ndarray, timeout_s=60))
        await asyncio.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ObjectGone, match="its owner's process has ended"):
            await waiting


# ---- life ------------------------------------------------------------------------------------------------------------


async def test_an_object_lives_until_its_last_hold_ends() -> None:
    async with two_nodes("mapped") as (owner, reader):
        handle = await owner.put(np.arange(LARGE))
        await reader.hold(handle, timeout_s=5)
        owner.release(handle)
        owner.release(handle)  # does nothing: this node's hold has ended
        assert int((await reader.get(handle, np.ndarray, timeout_s=5))[5]) == 5
        reader.release(handle)
        await until(lambda: owner.description().objects["objects"] == 0)
        for node in (owner, reader):
            with pytest.raises(ObjectGone, match="it was released"):
                await node.get(handle, np.ndarray, timeout_s=5)


async def test_an_object_put_in_a_block_ends_with_it() -> None:
    async with Node("owner") as node:
        async with node.putting(np.arange(LARGE)) as handle:
            assert int((await node.get(handle, np.ndarray, timeout_s=5))[-1]) == LARGE - 1
        with pytest.raises(ObjectGone):
            await node.get(handle, np.ndarray, timeout_s=5)


async def test_a_closed_owners_objects_are_gone_and_what_was_got_stays() -> None:
    async with Node("reader") as reader:
        async with Node("owner") as owner:
            handle = await owner.put(np.full(LARGE, 3, np.uint8))
            got = await reader.get(handle, np.ndarray, timeout_s=5)
            own = await owner.get(handle, np.ndarray, timeout_s=5)
            await reader.hold(handle, timeout_s=5)  # so that the owner knows whom to tell of its end
        with pytest.raises(ObjectGone, match="node owner is lost: it has closed"):
            await reader.get(handle, np.ndarray, timeout_s=5)
        assert int(got.sum()) == int(own.sum()) == 3 * LARGE
        del got, own


async def test_a_view_that_is_dropped_in_another_thread_gives_the_memory_back() -> None:
    async with two_nodes("mapped") as (owner, reader):
        handle = await owner.put(np.full(LARGE, 3, np.uint8))
        values = [await reader.get(handle, np.ndarray, timeout_s=5)]
        assert await asyncio.to_thread(lambda: int(values.pop().sum())) == 3 * LARGE
        gc.collect()
        await asyncio.sleep(0.01)
        owner.release(handle)
        assert (await owner.put(np.zeros(LARGE, np.uint8))).place == handle.place


async def test_a_large_put_leaves_the_event_loop_to_others() -> None:
    async with Node("owner") as node:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        others = asyncio.create_task(count_turns())
        handle = await node.put(np.arange(8 << 20, dtype=np.float64))
        others.cancel()
        assert turns > 8
        assert int((await node.get(handle, np.ndarray, timeout_s=5))[-1]) == (8 << 20) - 1


async def test_a_cancelled_put_leaves_nothing_behind() -> None:
    async with Node("owner") as node:
        putting = asyncio.create_task(node.put(np.arange(8 << 20, dtype=np.float64)))
        await asyncio.sleep(0)  # threads have begun to copy
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        left = node.description().objects
        assert (left["objects"], left["memory_bytes"], left["idle_bytes"]) == (0, 0, 0)


# ---- what is refused -------------------------------------------------------------------------------------------------


async def test_false_handles_are_named_and_do_no_harm() -> None:
    async with two_nodes("mapped") as (owner, reader):
        large = await owner.put(np.arange(LARGE))
        small = await owner.put(b"abc")
        replace = msgspec.structs.replace
        false: list[tuple[Object[Any], type[ObjectError], str]] = [
            (replace(large, size=1 << 60), ObjectError, "a false handle"),
            (replace(small, size=1 << 60), ObjectError, "a false handle"),
            (replace(small, id=999), ObjectGone, "its owner never had it"),
            (replace(large, id=999), ObjectGone, "its owner never had it"),
            (replace(small, id=-1), ObjectError, "names no object"),
            (replace(small, owner=replace(small.owner, epoch=0)), ObjectError, "names no object"),
            (replace(small, owner=replace(small.owner, epoch=5)), ObjectGone, "restarted"),
        ]
        for handle, error, text in false:
            with pytest.raises(error, match=text):
                await reader.get(handle, bytes if handle.type == "bytes" else np.ndarray, timeout_s=5)
        with pytest.raises(ObjectGone, match="its owner never had it"):
            await owner.get(replace(small, id=999), bytes, timeout_s=5)
        assert large.place is not None
        for garbled in ({"descriptor": 0}, {"inode": 1}, {"capacity": 1}):
            place = replace(large.place, **garbled)
            got = await reader.get(replace(large, place=place), np.ndarray, timeout_s=5)
            assert int(got[-1]) == LARGE - 1, "its owner was asked for the place"
            del got


async def test_what_is_got_is_of_the_declared_type() -> None:
    async with two_nodes("mapped") as (owner, reader):
        handle = await owner.put(Batch("x", np.arange(9), np.arange(9)))
        with pytest.raises(DecodeError, match="is a Batch, expected ndarray"):
            await reader.get(handle, np.ndarray, timeout_s=5)
        with pytest.raises(DecodeError, match="is bytes, expected Batch"):
            await reader.get(await owner.put(b"abc"), Batch, timeout_s=5)
        with pytest.raises(TypeError, match="cannot put a object in a message"):
            await owner.put(object())
        assert owner.description().objects["objects"] == 2


# ---- memory and disk -------------------------------------------------------------------------------------------------


async def test_what_memory_has_no_room_for_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    store = ObjectStore(memory_bytes=4 * LARGE, directory=tmp_path / "spill")
    async with Node("owner", objects=store) as owner, Node("reader") as reader:
        handles = []
        for value in range(10):
            handles.append(await owner.put(np.full(LARGE, value, np.uint8)))
            assert owner.description().objects["memory_bytes"] <= 4 * LARGE
        assert count(owner, "objects_spilled") >= 6
        for value in (0, 9, 3, 0):
            for node in (reader, owner):
                got = await node.get(handles[value], np.ndarray, timeout_s=10)
                assert int(got.min()) == int(got.max()) == value
                del got
        assert count(owner, "objects_restored") >= 2
        for handle in handles:
            owner.release(handle)
        (own,) = (tmp_path / "spill").glob("node-*")
        await until(lambda: [path.name for path in own.iterdir()] == ["lock"])
    assert not list((tmp_path / "spill").glob("node-*"))


async def test_what_a_killed_node_spilled_is_removed_when_another_begins(tmp_path: Path) -> None:
    left, living = tmp_path / "node-left", tmp_path / "node-living"
    for directory in (left, living):
        directory.mkdir()
        (directory / "1").write_bytes(b"an object")
    with (living / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with Node("n", objects=ObjectStore(directory=tmp_path)):
            await until(lambda: not left.exists())
            assert (living / "1").read_bytes() == b"an object"


async def test_what_is_being_read_is_not_moved_and_a_store_full_of_it_says_so(tmp_path: Path) -> None:
    store = ObjectStore(memory_bytes=3 * LARGE, directory=tmp_path / "spill")
    async with Node("owner", objects=store) as owner, Node("reader") as reader:
        handles = [await owner.put(np.full(LARGE - 4096, value, np.uint8)) for value in range(3)]
        views = [await reader.get(handle, np.ndarray, timeout_s=5) for handle in handles]
        with pytest.raises(ObjectStoreFull, match=r"all 3 objects in it .* are being read"):
            await owner.put(np.zeros(LARGE - 4096, np.uint8))
        with pytest.raises(ObjectStoreFull, match="give the node a larger one"):
            await owner.put(np.zeros(4 * LARGE, np.uint8))
        assert [int(view[0]) for view in views] == [0, 1, 2]
        del views
        await asyncio.sleep(0.01)
        await owner.put(np.zeros(LARGE - 4096, np.uint8))


async def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path: Path) -> None:
    store = ObjectStore(memory_bytes=2 * LARGE, directory=tmp_path / "spill")
    async with Node("owner", objects=store) as owner:
        kept = [await owner.put(np.full(LARGE - 4096, value, np.uint8)) for value in range(2)]
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE // 2, limit[1]))  # a write beyond it fails half way
        try:
            with pytest.raises(ObjectStoreFull, match=r"could not be moved to disk to make room: .*File too large"):
                await owner.put(np.zeros(LARGE - 4096, np.uint8))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        (own,) = (tmp_path / "spill").glob("node-*")
        assert [path.name for path in own.iterdir()] == ["lock"], "nor is there half of a file"
        for value, handle in enumerate(kept):
            assert int((await owner.get(handle, np.ndarray, timeout_s=5))[0]) == value
