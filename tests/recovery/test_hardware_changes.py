"""A node whose hardware changes while a run goes on: who hears of it, in virtual time, at the real coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from actors.core import Node
from bus.virtual_time import run
from coordinator.allegiance import Allegiance
from coordinator.messages import Follow, Following, HardwareChanged, Join, Welcome
from coordinator.vigil import LOOK_S, keep_watch
from hwprobe import AffinityMap, Finding, Gpu, build_affinity_map, decode, encode
from hwprobe.watching import Changes
from tests.hwprobe.test_affinity import host
from tests.scheduling.cluster import Cluster, cluster
from tests.scheduling.support import rules

CARDS = tuple(Gpu(index=index, name="NVIDIA H20", memory_bytes=90 << 30, numa_node=0) for index in range(2))
AFFINITY = build_affinity_map(host("env-1", gpus=CARDS))
LOST = Finding("lost", "error", ("gpu1",), "NVML says: GPU is lost")
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


async def joined(made: Cluster, name: str, watch: Callable[[], Script]) -> tuple[Node, Allegiance]:
    """A node of the run that keeps watch, as ``coordinator.membership`` has it."""
    node, allegiance = Node(name, transport=made.network.join(name)), Allegiance(lambda outcome: None)
    await node.spawn(lambda: allegiance, "member", restarts=0)
    join = Join(node.address, ["env"], 1, encode(AFFINITY))
    await made.node.ask(made.ref, join, Welcome, timeout_s=5.0)
    allegiance.joined(join, made.ref, silence_s=20.0, takeover_s=30.0)
    node.background(keep_watch(node.address, AFFINITY, allegiance.hardware_changed, watch))
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
                seen.append((gpus(affinity), [finding.code for finding in affinity.findings]))
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


def test_what_an_earlier_incarnation_says_of_its_hardware_changes_nothing() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            node, _ = await joined(made, "env-1", Script)
            earlier = msgspec.structs.replace(node.address, epoch=node.address.epoch - 1)
            made.coordinator.roster.changed(HardwareChanged(earlier, b"{}", ["nonsense"], []))
            assert gpus(told_by(made, "env-1")) == ["gpu0", "gpu1"]
            assert made.warnings == []
            await node.close()

    run(scenario())
