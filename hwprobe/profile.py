"""The user's ``resource_profile``: what a job may count on, where it differs from what is found or from data sheets.

Invariant: an unknown key, a wrong type or a negative count is refused with one line that names its path. In YAML::

    resource_profile:
      gpus:
        H800: {count: 32, mem_per_gpu: 80}
        H20: {count: 64, mem_per_gpu: 48}
      cpu: {cores: 128, numa: balanced}

Counts and cores are those of the whole pool that the map is built for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

Positive = Annotated[float, msgspec.Meta(gt=0)]


class GpuProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One hardware class; every figure given overrides the built-in table."""

    count: Annotated[int, msgspec.Meta(ge=0)] | None = None  # devices a job may use
    mem_per_gpu: Positive | None = None  # GiB a job may use of each
    bf16_tflops: Positive | None = None  # dense
    bandwidth_tb_s: Positive | None = None  # TB/s


class CpuProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The processors."""

    cores: Annotated[int, msgspec.Meta(ge=1)] | None = None  # CPUs a job may use
    numa: Literal["balanced", "compact", "off"] = "balanced"  # take cores evenly from all nodes, fill nodes, or ignore


class ResourceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    gpus: dict[str, GpuProfile] = {}  # hardware class -> figures
    cpu: CpuProfile = CpuProfile()


class ProfileError(ValueError):
    """A profile that cannot be used as written; one line for the user."""


def load_profile(path: Path) -> ResourceProfile:
    """Read a YAML file that is a profile, or holds one under ``resource_profile``. Raises ``ProfileError``."""
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if isinstance(tree, dict) and "resource_profile" in tree:
        tree = tree["resource_profile"]
    try:
        return msgspec.convert(tree, ResourceProfile)
    except msgspec.ValidationError as error:
        raise ProfileError(f"{path}: {error}") from None
