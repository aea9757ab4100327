"""What a run is started with, and the names under which its processes find each other.

Invariant: everything here is settled before the first process of a run starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.core import Node
from actors.policy import write_config
from bus.security import ClusterKey, read_key
from coordinator.checkpoints import RunCheckpoint
from coordinator.job import Job
from coordinator.messages import Role
from coordinator.resources.resolve import Placement
from hwprobe import AffinityMap

CONTROL = "control"
ADDRESS_FILE = "coordinator.address"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is started with beside its job."""

    job: Job
    placement: Placement
    affinity: AffinityMap
    job_directory: Path
    local_roles: Sequence[Role]
    resume: RunCheckpoint | None = None
    resume_directory: Path | None = None  # of that checkpoint
    host: str = "127.0.0.1"
    port: int = 0
    key_file: Path | None = None
    written: Job | None = None  # before it was resolved: for nodes on other hosts, which do that for themselves

    @property
    def key(self) -> ClusterKey | None:
        """From its file. Raises ``SecurityError``."""
        return None if self.key_file is None else read_key(self.key_file)


def open_node(launch: Launch, epoch: int | None) -> Node:
    """The control process's node. A leader's epoch is its node's: whoever has heard of a later one refuses it."""
    return Node(CONTROL, host=launch.host, port=launch.port, key=launch.key, epoch=epoch)


def policy_directory(job: Job, run_directory: Path) -> Path:
    """Where the processes that hold weights find ``config.json``; made here for a policy that starts from a shape."""
    if job.policy.path is not None:
        return Path(job.policy.path)
    directory = run_directory / "policy"
    write_config(job.policy.shape, directory)
    return directory
