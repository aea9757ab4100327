"""Objects on the simulated network: leases, losses, restarts, disks, and the counting of references against a model."""

import asyncio
import gc
from contextlib import suppress

import numpy as np
import pytest

from actors.core import Node
from actors.core.borrowing import RENEWALS
from actors.core.lending import TERM_S
from bus.message import DeadlineExceeded, PeerLost
from bus.objects import ObjectGone, ObjectStoreFull
from bus.objects.pool import IDLE_S
from bus.objects.simulated import SimulatedDisk
from bus.simulated import Link
from bus.virtual_time import run
from tests.actors.machines import Host, crash

pytestmark = pytest.mark.virtual_time

LARGE = 1 << 20


def now() -> float:
    return asyncio.get_running_loop().time()


def objects(node: Node) -> int:
    return node.description().objects["objects"]


@pytest.mark.parametrize(("machine", "how"), [("m1", "objects_got_local"), ("m2", "objects_got_remote")])
async def test_one_machine_maps_and_another_fetches(machine: str, how: str) -> None:
    host = Host()
    async with host.node("owner", "m1") as owner, host.node("reader", machine) as reader:
        handle = await owner.put(np.arange(LARGE))
        began = now()
        got = await reader.get(handle, np.ndarray, timeout_s=10)
        assert int(got[-1]) == LARGE - 1
        assert reader.description().counters[how] == 1
        took = now() - began
        # four connections of 2 round trips and 1 ms, and 8 MB at 1 GB/s
        assert took == pytest.approx(0.0 if machine == "m1" else 4 * 0.005 + 0.0084, abs=0.0005)


async def test_a_hold_outlasts_silence_as_long_as_it_can_be_renewed() -> None:
    host = Host()
    async with host.node("owner", "m1") as owner, host.node("holder", "m2") as holder:
        handle = await owner.put(b"abc")
        await holder.hold(handle, timeout_s=5)
        owner.release(handle)
        await asyncio.sleep(100 * TERM_S)
        assert await holder.get(handle, bytes, timeout_s=5) == b"abc"
        host.network.partition({"owner"}, {"holder"}, cut=True)
        await asyncio.sleep(TERM_S * 2 / 3 - 1)
        assert objects(owner) == 1
        await asyncio.sleep(TERM_S / 3 + 2)
        assert objects(owner) == 0
        host.network.heal()
        with pytest.raises(ObjectGone, match="the last lease on it expired"):
            await holder.get(handle, bytes, timeout_s=60)


async def test_an_object_put_for_a_while_goes_by_itself() -> None:
    async with Host().node("owner", "m1") as node:
        handle = await node.put(b"x" * 100, hold_s=5)
        assert await node.get(handle, bytes, timeout_s=5) == b"x" * 100
        await asyncio.sleep(4.9)
        assert objects(node) == 1
        await asyncio.sleep(0.2)
        assert objects(node) == 0
        with pytest.raises(ObjectGone, match="the last lease on it expired"):
            await node.get(handle, bytes, timeout_s=5)


async def test_what_a_crashed_node_held_is_freed_when_it_is_known_to_be_gone() -> None:
    host = Host()
    async with host.node("owner", "m1") as owner:
        handle = await owner.put(b"abc")
        async with host.node("holder", "m2") as holder:
            await holder.hold(handle, timeout_s=5)
            owner.release(handle)
            crash(holder)
        await asyncio.sleep(1)
        assert objects(owner) == 1, "nobody knows yet"
        async with host.node("holder", "m2") as again:  # its successor speaks
            with pytest.raises(ObjectGone, match="its last holder went: node holder restarted"):
                await again.get(handle, bytes, timeout_s=5)
        assert objects(owner) == 0


async def test_what_a_closing_node_held_is_freed_at_once() -> None:
    host = Host()
    async with host.node("owner", "m1") as owner:
        handle = await owner.put(b"abc")
        async with host.node("holder", "m2") as holder:
            await holder.hold(handle, timeout_s=5)
            owner.release(handle)
        await asyncio.sleep(0.1)
        assert objects(owner) == 0


async def test_a_get_from_an_owner_that_crashed_elsewhere_ends_by_its_silence_or_the_deadline() -> None:
    host = Host()
    async with host.node("owner", "m1") as owner, host.node("reader", "m2") as reader:
        handle = await owner.put(np.arange(LARGE))
        crash(owner)
        with pytest.raises(DeadlineExceeded, match="object 1 of owner"):
            await reader.get(handle, np.ndarray, timeout_s=5)
        with pytest.raises(ObjectGone, match="no sign of life"):
            await reader.get(handle, np.ndarray, timeout_s=60)
        began = now()
        with pytest.raises(ObjectGone, match="node owner is lost"):
            await reader.get(handle, np.ndarray, timeout_s=60)
        assert now() == began


async def test_a_fetch_survives_the_owners_release_and_a_crash_of_the_owner_ends_it() -> None:
    host = Host()
    host.network.set_link("owner", "reader", Link(latency_s=0.001, bulk_bytes_per_s=1e8))
    async with host.node("owner", "m1") as owner, host.node("reader", "m2") as reader:
        handles = [await owner.put(np.arange(16 * LARGE)) for _ in range(2)]  # 1.3 s each
        getting = asyncio.create_task(reader.get(handles[0], np.ndarray, timeout_s=10))
        await asyncio.sleep(0.5)
        owner.release(handles[0])
        assert int((await getting)[-1]) == 16 * LARGE - 1
        await asyncio.sleep(0.1)
        assert objects(owner) == 1
        getting = asyncio.create_task(reader.get(handles[1], np.ndarray, timeout_s=60))
        await asyncio.sleep(0.5)
        crash(owner)
        with pytest.raises(ObjectGone, match="no sign of life"):
            await getting


async def test_memory_is_kept_for_the_next_objects_at_both_ends_and_then_given_back() -> None:
    host = Host()
    async with host.node("owner", "m1") as owner, host.node("reader", "m1") as reader:
        for number in range(3):
            handle = await owner.put(np.full(LARGE, number, np.uint8))
            assert int((await reader.get(handle, np.ndarray, timeout_s=10))[7]) == number
            await asyncio.sleep(IDLE_S / 2)
            assert (owner.description().objects["idle_bytes"], reader.description().objects["mapped"]) == (0, 1)
            owner.release(handle)
            assert owner.description().objects["idle_bytes"] >= LARGE
        await asyncio.sleep(IDLE_S + 1)
        assert (owner.description().objects["idle_bytes"], reader.description().objects["mapped"]) == (0, 0)


async def test_a_cancelled_fetch_gives_back_what_it_borrowed() -> None:
    host = Host()
    async with host.node("owner", "m1") as owner, host.node("reader", "m2") as reader:
        handle = await owner.put(np.arange(16 * LARGE))
        for after_s in (0.0, 0.0005, 0.0015, 0.003, 0.05):
            getting = asyncio.create_task(reader.get(handle, np.ndarray, timeout_s=10))
            await asyncio.sleep(after_s)
            getting.cancel()
            await asyncio.sleep(1)
            assert getting.cancelled()
            assert owner.description().objects["leases"] == 1, "its own hold"
        assert int((await reader.get(handle, np.ndarray, timeout_s=10))[7]) == 7


async def test_a_fetch_cancelled_in_the_moment_of_its_failure_leaves_no_unseen_error() -> None:
    unseen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(repr(context)))
    for turns in range(5):
        host = Host()
        async with host.node("owner", "m1") as owner, host.node("reader", "m2") as reader:
            handle = await owner.put(np.arange(LARGE))
            host.network.partition({"owner"}, {"reader"})
            getting = asyncio.create_task(reader.get(handle, np.ndarray, timeout_s=60))
            await asyncio.sleep(0.5)
            reader.lose(owner.address, "so it is said")
            for _ in range(turns):
                await asyncio.sleep(0)
            getting.cancel()
            with suppress(asyncio.CancelledError, ObjectGone):
                await getting
    del getting
    gc.collect()
    assert unseen == []


async def test_what_gets_lost_on_the_way_or_with_its_reader_is_not_said_to_be_gone() -> None:
    host = Host()
    async with host.node("owner", "m1") as owner, host.node("reader", "m2") as reader:
        handle = await owner.put(np.arange(16 * LARGE))
        getting = asyncio.create_task(reader.get(handle, np.ndarray, timeout_s=10))
        await asyncio.sleep(0.05)
        host.network.set_link("owner", "reader", Link(latency_s=0.001, loss=0.5))
        with pytest.raises(PeerLost, match="was lost on the way") as lost:
            await getting
        assert not isinstance(lost.value, ObjectGone)
        host.network.set_link("owner", "reader", Link(latency_s=0.001))
        getting = asyncio.create_task(reader.get(handle, np.ndarray, timeout_s=10))
        await asyncio.sleep(0.05)
        await reader.close()
        with pytest.raises(PeerLost, match="this node is closing"):
            await getting


async def test_a_lease_that_is_given_back_just_as_it_is_to_be_renewed_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host()
    async with host.node("owner", "m1") as owner, host.node("holder", "m2") as holder:
        handle = await owner.put(b"abc")
        loop = asyncio.get_running_loop()
        holding = asyncio.create_task(holder.hold(handle, timeout_s=5))
        await asyncio.sleep(0)
        loop.call_later(TERM_S / RENEWALS, holder.release, handle)  # behind the renewal's timer, in the same turn
        await holding
        await asyncio.sleep(TERM_S)
        assert objects(owner) == 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_memory_keeps_its_bound_while_many_put_and_get_at_once() -> None:
    host = Host()
    bound = 4 * LARGE
    async with (
        host.node("owner", "m1", memory_bytes=bound) as owner,
        host.node("near", "m1") as near,
        host.node("far", "m2") as far,
    ):
        most = 0

        async def work(value: int) -> None:
            nonlocal most
            handle = await owner.put(np.full(LARGE - 4096, value, np.uint8))
            for node in (near, far, owner):
                await asyncio.sleep(0.001 * value)
                got = await node.get(handle, np.ndarray, timeout_s=60)
                assert int(got.min()) == int(got.max()) == value
                del got
                most = max(most, owner.description().objects["memory_bytes"])
            owner.release(handle)

        await asyncio.gather(*(work(value) for value in range(12)))
        assert most <= bound
        await asyncio.sleep(1)
        left = owner.description()
        assert (left.objects["objects"], left.objects["memory_bytes"], left.objects["leases"]) == (0, 0, 0)
        assert left.counters["objects_spilled"] > 0
        assert left.counters["objects_restored"] > 0


async def test_a_put_that_finds_the_disk_full_fails_and_all_else_is_there() -> None:
    host = Host()
    disk = SimulatedDisk(capacity=2 * LARGE)
    async with host.node("owner", "m1", memory_bytes=2 * LARGE, disk=disk) as owner:
        handles = [await owner.put(np.full(LARGE - 4096, value, np.uint8)) for value in range(4)]  # two on disk
        with pytest.raises(ObjectStoreFull, match="No space left on device"):
            await owner.put(np.full(LARGE - 4096, 4, np.uint8))
        for value in (3, 2):
            assert int((await owner.get(handles[value], np.ndarray, timeout_s=5))[0]) == value
        owner.release(handles[0])
        assert int((await owner.get(handles[1], np.ndarray, timeout_s=5))[0]) == 1


async def test_what_was_garbled_on_disk_is_gone_and_never_returned() -> None:
    host = Host()
    disk = SimulatedDisk()
    async with host.node("owner", "m1", memory_bytes=LARGE, disk=disk) as owner:
        first, _ = [await owner.put(np.full(LARGE - 4096, value, np.uint8)) for value in range(2)]
        disk.files["1"] = disk.files["1"][:-1] + b"x"
        for _ in range(2):
            with pytest.raises(ObjectGone, match="cannot be read back"):
                await owner.get(first, np.ndarray, timeout_s=5)


def test_the_same_program_does_the_same_twice() -> None:
    async def main() -> str:
        host = Host()
        async with host.node("owner", "m1") as owner, host.node("reader", "m2") as reader:
            handle = await owner.put(np.arange(LARGE))
            await reader.hold(handle, timeout_s=5)
            await reader.get(handle, np.ndarray, timeout_s=10)
            return host.network.digest

    assert run(main(), seed=7) == run(main(), seed=7)
