"""What objects lie in: shared memory and its locks, segments that are used again, files on disk."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bus.objects.disk import FileDisk
from bus.objects.handle import Layout
from bus.objects.host import Host, Watched, runs, this_host
from bus.objects.image import Head, encode_head, frames_at, read_image, wipe_label, write_label
from bus.objects.memory import SHARED_FROM_BYTES, SharedMemory
from bus.objects.pool import IDLE_S, STEPS, Pool, capacity_for
from bus.objects.simulated import SimulatedMachine
from bus.virtual_time import run
from tests.actors.support import descriptors, until

SIZE = 1 << 20


def host_of(memory: SharedMemory) -> Host:
    assert memory.host is not None
    return memory.host


# ---- shared memory ---------------------------------------------------------------------------------------------------


def test_shared_memory_has_no_name_cannot_shrink_and_goes_with_its_last_user() -> None:
    before, open_before = set(os.listdir("/dev/shm")), descriptors()
    owner, reader = SharedMemory(), SharedMemory()
    segment = owner.allocate(SIZE)
    segment.view[:3] = b"abc"
    assert segment.place is not None
    mapped = reader.map(host_of(owner), segment.place)
    assert mapped is not None
    assert bytes(mapped.view[:3]) == b"abc"
    assert mapped.view.readonly
    with pytest.raises(PermissionError):
        os.ftruncate(segment.place.descriptor, 10)
    kept = mapped.view[:3]
    segment.release()
    mapped.close()
    assert bytes(kept) == b"abc"
    del kept
    assert set(os.listdir("/dev/shm")) == before
    assert descriptors() == open_before


def test_nothing_but_the_segment_that_is_meant_is_mapped(tmp_path: Path) -> None:
    memory = SharedMemory()
    segment = memory.allocate(SIZE)
    place, host = segment.place, host_of(memory)
    assert place is not None
    (tmp_path / "secret").write_bytes(bytes(SIZE))
    with (tmp_path / "secret").open("rb") as file:
        replace = msgspec.structs.replace
        found = os.fstat(file.fileno()).st_ino
        false = [replace(place, descriptor=file.fileno(), inode=found), replace(place, inode=place.inode + 1)]
        false += [replace(place, capacity=SIZE * 2), replace(place, descriptor=10_000)]
        assert [memory.map(host, one) for one in false] == [None] * 4
    for other in ({"boot": "another machine"}, {"processes": 1}, {"started": 1}, {"pid": 1}):
        assert memory.map(replace(host, **other), place) is None


def test_another_users_file_of_this_name_that_could_shrink_is_not_mapped() -> None:
    memory = SharedMemory()
    descriptor = os.memfd_create("rollart-object", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, SIZE)
        sample = memory.allocate(SIZE)
        assert sample.place is not None
        inode = os.fstat(descriptor).st_ino
        place = msgspec.structs.replace(sample.place, descriptor=descriptor, inode=inode)
        assert memory.map(host_of(memory), place) is None
    finally:
        os.close(descriptor)


def test_a_lock_lasts_as_long_as_its_reader() -> None:
    memory = SharedMemory()
    segment = memory.allocate(SIZE)
    assert segment.place is not None
    one, other = (memory.map(host_of(memory), segment.place) for _ in range(2))
    assert one is not None
    assert other is not None
    assert segment.unread()
    assert one.lock()
    assert other.lock()
    one.unlock()
    assert not segment.unread()
    other.close()
    assert segment.unread()
    segment.pins += 1
    assert not segment.unread()


def test_beyond_its_share_of_descriptors_memory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory()
    monkeypatch.setattr("bus.objects.memory.resource.getrlimit", lambda what: (8, 8))
    before = descriptors()
    segment = memory.allocate(SIZE)
    assert segment.place is None
    segment.view[:3] = b"abc"
    assert descriptors() == before


def test_a_process_is_known_to_run_until_it_has_ended() -> None:
    here = this_host()
    assert here is not None
    assert runs(here, here) is True
    assert runs(msgspec.structs.replace(here, started=here.started + 1), here) is False
    assert runs(msgspec.structs.replace(here, boot="another"), here) is None
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    there = Host(here.boot, here.processes, child.pid, int(stat.rpartition(")")[2].split()[19]))
    assert runs(there, here) is True
    child.send_signal(signal.SIGKILL)
    asyncio.run(until(lambda: runs(there, here) is False))  # also before anybody has asked for what is left of it
    child.wait()
    assert runs(there, here) is False


def test_a_watched_process_runs_until_it_has_ended_and_takes_one_descriptor() -> None:
    here, before = this_host(), descriptors()
    assert here is not None
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    there = Host(here.boot, here.processes, child.pid, int(stat.rpartition(")")[2].split()[19]))
    with pytest.raises(ProcessLookupError):
        Watched(msgspec.structs.replace(there, started=there.started + 1))
    watched = [Watched(there)]
    assert watched[0].runs()
    assert descriptors() == before + 1
    child.send_signal(signal.SIGKILL)
    asyncio.run(until(lambda: not watched[0].runs()))
    child.wait()
    with pytest.raises(ProcessLookupError):
        Watched(there)
    watched.clear()
    assert descriptors() == before


def test_an_owner_of_what_is_mapped_is_watched_once() -> None:
    owner, reader = SharedMemory(), SharedMemory()
    segments = [owner.allocate(SIZE) for _ in range(3)]
    before = descriptors()
    places = [segment.place for segment in segments if segment.place is not None]
    mapped = [one for place in places if (one := reader.map(host_of(owner), place)) is not None]
    assert descriptors() == before + 3 * 2 + 1  # its own, the mapping's copy of it, and the owner's
    assert reader.runs(host_of(owner)) is True
    for one in mapped:
        one.close()
    assert descriptors() == before


# ---- images ----------------------------------------------------------------------------------------------------------


def test_an_image_is_read_only_while_it_is_labelled_as_what_is_looked_for() -> None:
    head = encode_head(Head("ndarray", Layout((3, 70))))
    view = memoryview(bytearray(frames_at(head) + 64 + 128))
    assert read_image(view, 7, 1) is None
    view[frames_at(head) :][:3] = b"abc"
    write_label(view, 7, 1, head)
    found = read_image(view, 7, 1)
    assert found is not None
    assert found[0] == Head("ndarray", Layout((3, 70)))
    assert [bytes(frame)[:3] for frame in found[0].layout.frames(found[1])] == [b"abc", b"\0\0\0"]
    assert read_image(view, 7, 2) is None
    assert read_image(view, 8, 1) is None
    assert read_image(view[:-1], 7, 1) is None, "too short for what it says"
    for garbled in range(64, 64 + len(head)):
        copy = memoryview(bytearray(view))
        copy[garbled] ^= 0xFF
        other = read_image(copy, 7, 1)
        assert other is None or other[0].layout.span <= len(view)
    wipe_label(view)
    assert read_image(view, 7, 1) is None


# ---- the pool --------------------------------------------------------------------------------------------------------


def test_segments_are_used_again_within_the_bound_and_given_up_when_idle() -> None:
    async def main() -> None:
        pool = Pool(SimulatedMachine("m").memory(), 4 * SIZE)
        one, other = pool.take(SIZE), pool.take(SIZE)
        assert one is not None
        assert other is not None
        pool.give(one)
        assert (pool.used, pool.idle) == (SIZE, SIZE)
        assert pool.take(SIZE - 1000) is one
        other.clean = False
        pool.give(other)
        assert (pool.used, pool.idle) == (SIZE, 0), "what may still be read is not used again"
        pool.give(one)
        large = pool.take(4 * SIZE)
        assert large is not None
        assert pool.idle == 0, "room was needed"
        assert pool.take(1) is None
        pool.give(large)
        await asyncio.sleep(IDLE_S + 1)
        assert (pool.used, pool.idle) == (0, 0)

    run(main(), seed=1)


def test_a_segment_that_is_read_waits_until_it_is_not() -> None:
    async def main() -> None:
        pool = Pool(SimulatedMachine("m").memory(), 4 * SIZE)
        one = pool.take(SIZE)
        assert one is not None
        one.pins += 1
        pool.give(one)
        second = pool.take(SIZE)
        assert second is not one
        one.unpin()
        assert pool.take(SIZE) is one

    run(main(), seed=1)


@pytest.mark.parametrize("size", [1, SHARED_FROM_BYTES - 1, SHARED_FROM_BYTES, 1_000_000, 64 << 20, (64 << 20) + 1])
def test_a_segment_is_an_eighth_larger_than_its_object_at_most(size: int) -> None:
    capacity = capacity_for(size)
    assert size <= capacity <= max(size * (1 + 1 / STEPS), size + 4096)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back_or_refused(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path)
    content = os.urandom(9_000_001)
    checksum = asyncio.run(disk.write("7", memoryview(content)))
    back = memoryview(bytearray(len(content)))
    asyncio.run(disk.read("7", back, checksum))
    assert back == content
    (own,) = tmp_path.glob("node-*")
    for garbled in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), content + b"x"):
        (own / "7").write_bytes(garbled)
        with pytest.raises(OSError, match="written"):
            asyncio.run(disk.read("7", back, checksum))
    disk.remove("7")
    disk.remove("never there")
    with pytest.raises(FileNotFoundError):
        asyncio.run(disk.read("7", back, checksum))
    disk.close()
    disk.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_what_a_killed_node_left_is_removed_by_the_next_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, time\nfrom pathlib import Path\nfrom bus.objects.disk import FileDisk\n"
        "asyncio.run(FileDisk(Path(sys.argv[1])).write('1', memoryview(bytes(100))))\nprint(1, flush=True)\n"
        "time.sleep(600)"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    killed = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert killed.stdout is not None
    killed.stdout.readline()
    killed.kill()
    killed.wait()
    killed.stdout.close()
    (left,) = tmp_path.glob("node-*")
    assert (left / "1").exists()
    living, another = FileDisk(tmp_path), FileDisk(tmp_path)
    asyncio.run(living.write("1", memoryview(bytes(100))))
    assert not left.exists()
    asyncio.run(another.write("1", memoryview(bytes(100))))
    assert len(list(tmp_path.glob("node-*"))) == 2
    living.close()
    another.close()


def test_another_users_directory_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FileDisk(tmp_path)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr("bus.objects.disk.os.getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="another user's"):
        asyncio.run(disk.write("1", memoryview(b"abc")))


async def test_a_node_does_not_wait_for_ever_for_a_directory_that_another_process_keeps_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bus.objects.disk.BEGIN_S", 0.1)
    disk = FileDisk(tmp_path)
    with (tmp_path / "lock").open("wb") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)  # as a process does that is stopped just then
        with pytest.raises(OSError, match="has kept the directory for spilled objects locked"):
            await disk.write("1", memoryview(b"content"))
    checksum = await disk.write("1", memoryview(b"content"))
    into = memoryview(bytearray(7))
    await disk.read("1", into, checksum)
    assert bytes(into) == b"content"
    disk.close()


async def test_two_first_writes_at_once_go_to_one_directory(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path)
    with (tmp_path / "lock").open("wb") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        writes = [asyncio.create_task(disk.write(name, memoryview(b"content"))) for name in ("1", "2")]
        await asyncio.sleep(0.1)  # both wait for the lock
    into = memoryview(bytearray(7))
    for name, checksum in zip(("1", "2"), await asyncio.gather(*writes), strict=True):
        await disk.read(name, into, checksum)
    disk.close()
    assert os.listdir(tmp_path) == ["lock"]
