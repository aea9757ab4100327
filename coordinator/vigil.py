"""A node keeps an eye on its hardware, and says what changes: its map is then as the hardware is.

    hwprobe's watch --look, every LOOK_S--> what began, what ended --HardwareChanged--> the coordinator's roster, people
                                                                                       and the metadata store

Invariant: nothing is sent while nothing changes; what is sent is the whole map of the host under all that holds, so one
that is lost on the way is made good by the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from bus.message import NodeAddress
from coordinator.messages import HardwareChanged
from hwprobe import AffinityMap, Finding, encode
from hwprobe.watching import Changes, Watch

LOOK_S = 5.0


class Watching(Protocol):
    """Of this host's hardware."""

    def look(self) -> Changes: ...

    def stop(self, timeout_s: float) -> None: ...


async def keep_watch(
    node: NodeAddress,
    affinity: AffinityMap,
    tell: Callable[[HardwareChanged], None],
    watch: Callable[[], Watching] = Watch,
) -> None:
    """Until it is cancelled. ``affinity``: of this host, as it was probed."""
    watching = watch()
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            changes = watching.look()
            if changes:
                now = encode(affinity.under(changes.present))
                tell(
                    HardwareChanged(
                        node, now, [_line(one) for one in changes.begun], [_line(one) for one in changes.ended]
                    )
                )
    finally:
        watching.stop(0.0)  # its thread ends by itself: nobody waits for a driver here


def _line(finding: Finding) -> str:
    return f"{', '.join(finding.subjects)}: {finding.detail}"
