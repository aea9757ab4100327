"""A node whose hardware changes while a run goes on: who hears of it, in virtual time, at the real coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from actors.core import Node
from bus.simulated import Link, SimulatedNetwork
from bus.virtual_time import run
from coordinator.allegiance import Allegiance
from coordinator.messages import Follow, Following, HardwareChanged, Join, Welcome
from coordinator.vigil import LOOK_S, Vigil
from hwprobe import AffinityMap, Finding, Gpu, build_affinity_map, decode, encode
from hwprobe.watching import Changes
from tests.hwprobe.test_affinity import host
from tests.scheduling.cluster import Cluster, cluster
from tests.scheduling.support import rules

CARDS = tuple(Gpu(index=index, name="NVIDIA H20", memory_bytes=90 << 30, numa_node=0) for index in range(2))
AFFINITY = build_affinity_map(host("env-1", gpus=CARDS))
LOST = Finding("lost", "error", ("gpu1",), "NVML says: GPU is lost")
SLOW = Finding("throttled", "warning", ("gpu0",), "its clocks are held down: hw_slowdown")
FOUND_SLOW = msgspec.structs.replace(AFFINITY, findings=(*AFFINITY.findings, SLOW))
QUIET = Changes((), (), ())


class Script:
    """A watch whose looks were written beforehand."""

    def __init__(self, *looks: Changes) -> None:
        self._looks = list(looks)
        self.stopped = 0

    def look(self) -> Changes:
        return self._looks.pop(0) if self._looks else QUIET

    def stop(self, timeout_s: float) -> None:
        self.stopped += 1


def told_by(made: Cluster, name: str) -> AffinityMap:
    """The map that the coordinator has of a node."""
    (join,) = [join for join in made.coordinator.roster.joins if join.node.name == name]
    return decode(join.affinity)


def gpus(affinity: AffinityMap) -> list[str]:
    return [device.id for device in affinity.gpus]


def codes(affinity: AffinityMap) -> list[str]:
    return [finding.code for finding in affinity.findings]


def heard_by(made: Cluster) -> list[HardwareChanged]:
    """All that the coordinator is told of hardware, from now on."""
    heard: list[HardwareChanged] = []
    changed = made.coordinator.roster.changed

    def note(message: HardwareChanged) -> None:
        heard.append(message)
        changed(message)

    made.coordinator.roster.changed = note  # type: ignore[method-assign]
    return heard


async def joined(
    made: Cluster, name: str, watch: Callable[[], Script], affinity: AffinityMap = AFFINITY
) -> tuple[Node, Allegiance]:
    """A node of the run that keeps watch, as ``coordinator.membership`` has it."""
    node, allegiance = Node(name, transport=made.network.join(name)), Allegiance(lambda outcome: None)
    await node.spawn(lambda: allegiance, "member", restarts=0)
    join = Join(node.address, ["env"], 1, encode(affinity))
    await made.node.ask(made.ref, join, Welcome, timeout_s=5.0)
    leader = allegiance.joined(join, made.ref, silence_s=60.0, takeover_s=60.0)
    vigil = Vigil(node.address, leader, affinity, keep=allegiance.hardware, watch=watch)
    node.background(vigil.run(node))
    return node, allegiance


def test_a_gpu_that_is_lost_goes_from_the_coordinators_map_and_comes_back() -> None:
    async def scenario() -> None:
        script = Script(QUIET, Changes((LOST,), (), (LOST,)), QUIET, Changes((), (LOST,), ()))
        async with cluster(rules(alpha=0, groups=1)) as made:
            node, _ = await joined(made, "env-1", lambda: script)
            seen = []
            for _ in range(4):
                await asyncio.sleep(LOOK_S + 0.1)
                affinity = told_by(made, "env-1")
                seen.append((gpus(affinity), codes(affinity)))
            assert seen == [
                (["gpu0", "gpu1"], []),
                (["gpu0"], ["lost"]),
                (["gpu0"], ["lost"]),
                (["gpu0", "gpu1"], []),
            ]
            assert made.warnings == ["env-1: gpu1: NVML says: GPU is lost"]  # said once
            await node.close()
            assert script.stopped == 1

    run(scenario())


def test_a_new_leader_hears_the_map_as_it_is_and_not_as_it_was() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            node, allegiance = await joined(made, "env-1", lambda: Script(Changes((LOST,), (), (LOST,))))
            await asyncio.sleep(LOOK_S + 1.0)
            following = await made.node.ask(allegiance.ref, Follow(made.ref, begun=True), Following, timeout_s=5.0)
            assert gpus(decode(following.join.affinity)) == ["gpu0"]
            await node.close()

    run(scenario())


def test_nothing_is_said_while_nothing_changes_though_figures_move() -> None:
    async def scenario() -> None:
        more = msgspec.structs.replace(SLOW, detail="its clocks are held down: hw_slowdown, at 990 MHz")
        script = Script(QUIET, Changes((SLOW,), (), (SLOW,)), Changes((), (), (more,)), Changes((), (), (SLOW,)))
        async with cluster(rules(alpha=0, groups=1)) as made:
            heard = heard_by(made)
            node, _ = await joined(made, "env-1", lambda: script)
            await asyncio.sleep(4.5 * LOOK_S)
            assert [message.begun for message in heard] == [["gpu0: its clocks are held down: hw_slowdown"]]
            await node.close()

    run(scenario())


@pytest.mark.parametrize("unanswered", [0, 2])
def test_what_the_probe_found_of_gpus_stands_until_the_driver_has_answered_and_then_leaves_the_map(
    unanswered: int,
) -> None:
    async def scenario() -> None:
        starting = Changes((), (), (), gpus_seen=False)
        async with cluster(rules(alpha=0, groups=1)) as made:
            node, _ = await joined(made, "env-1", lambda: Script(*unanswered * [starting], QUIET), FOUND_SLOW)
            seen = [codes(told_by(made, "env-1"))]
            for _ in range(unanswered + 1):
                await asyncio.sleep(LOOK_S + 0.1)
                seen.append(codes(told_by(made, "env-1")))
            assert seen == [["throttled"]] * (unanswered + 1) + [[]]
            await node.close()

    run(scenario())


def test_a_change_that_a_broken_connection_takes_along_is_told_again_though_it_was_the_last() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            node, _ = await joined(made, "env-1", lambda: Script(Changes((LOST,), (), (LOST,))))
            made.network.set_link("env-1", "control", Link(latency_s=0.5))
            await asyncio.sleep(LOOK_S + 0.2)
            made.network.cut("env-1", "control")  # while it is under way
            await asyncio.sleep(1.0)
            assert gpus(told_by(made, "env-1")) == ["gpu0", "gpu1"]
            await asyncio.sleep(10.0)
            assert gpus(told_by(made, "env-1")) == ["gpu0"]
            assert made.warnings == ["env-1: gpu1: NVML says: GPU is lost"]
            await node.close()

    run(scenario())


def test_a_change_while_the_leader_is_out_of_reach_is_known_once_it_is_back() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            node, _ = await joined(made, "env-1", lambda: Script(Changes((LOST,), (), (LOST,))))
            made.network.partition({"env-1"}, {"control", "admin"}, cut=True)
            await asyncio.sleep(LOOK_S + 10.0)
            assert gpus(told_by(made, "env-1")) == ["gpu0", "gpu1"]
            made.network.heal()
            await asyncio.sleep(20.0)
            assert gpus(told_by(made, "env-1")) == ["gpu0"]
            assert set(made.warnings) == {"env-1: gpu1: NVML says: GPU is lost"}
            await node.close()

    run(scenario())


@pytest.mark.parametrize("answered", [False, True])
def test_a_change_that_the_old_leader_never_answered_for_or_it_alone_is_told_to_the_next_one(answered: bool) -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=0)
        async with (
            cluster(rules(alpha=0, groups=1), network=network) as old,
            cluster(rules(alpha=0, groups=1), network=network, name="-next") as new,
        ):
            node, allegiance = await joined(old, "env-1", lambda: Script(Changes((LOST,), (), (LOST,))))
            following = await new.node.ask(allegiance.ref, Follow(new.ref), Following, timeout_s=5.0)
            await new.node.ask(new.ref, following.join, Welcome, timeout_s=5.0)  # with the map as it was
            if not answered:
                network.partition({"env-1", "control-next"}, {"control"}, cut=True)
            await asyncio.sleep(LOOK_S + 1.0)
            assert gpus(told_by(old, "env-1")) == (["gpu0"] if answered else ["gpu0", "gpu1"])
            await new.node.ask(allegiance.ref, Follow(new.ref, begun=True), Following, timeout_s=5.0)
            assert gpus(told_by(new, "env-1")) == ["gpu0", "gpu1"]
            await asyncio.sleep(20.0)
            assert gpus(told_by(new, "env-1")) == ["gpu0"]
            assert new.warnings == ([] if answered else ["env-1: gpu1: NVML says: GPU is lost"])
            await node.close()

    run(scenario())


def test_a_map_that_does_not_fit_is_told_once_and_the_watch_goes_on() -> None:
    async def scenario() -> None:
        large = Finding("memory_pressure", "warning", ("memory",), "x" * 70_000)
        larger = Finding("memory_full", "warning", ("memory",), "y" * 70_000)
        script = Script(
            Changes((large,), (), (large,)),
            Changes((larger,), (), (large, larger)),
            Changes((LOST,), (large, larger), (LOST,)),
        )
        async with cluster(rules(alpha=0, groups=1)) as made:
            node, _ = await joined(made, "env-1", lambda: script)
            await asyncio.sleep(2 * LOOK_S + 1.0)
            assert gpus(told_by(made, "env-1")) == ["gpu0", "gpu1"]
            (told,) = [line for line in made.warnings if "affinity map" in line]
            assert "expected at most 65536 bytes, found 7" in told  # and so many thousands
            await asyncio.sleep(LOOK_S)
            assert gpus(told_by(made, "env-1")) == ["gpu0"]
            assert "env-1: gpu1: NVML says: GPU is lost" in made.warnings
            await node.close()

    run(scenario())


def test_what_an_earlier_incarnation_says_of_its_hardware_changes_nothing() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            node, _ = await joined(made, "env-1", Script)
            earlier = msgspec.structs.replace(node.address, epoch=node.address.epoch - 1)
            with pytest.raises(ValueError, match=r"env-1 .* does not take part"):
                made.coordinator.roster.changed(HardwareChanged(earlier, b"{}", ["nonsense"], []))
            assert gpus(told_by(made, "env-1")) == ["gpu0", "gpu1"]
            assert made.warnings == []
            await node.close()

    run(scenario())
