"""Know the hardware: probe a host, and map its devices to what they are good for.

    >>> from hwprobe import build_affinity_map, probe
    >>> affinity = build_affinity_map(probe())
    >>> affinity.cores >= 1
    True

Depends on psutil, msgspec and (where there are GPUs) nvidia-ml-py; on no other package of this project.
"""

from hwprobe.affinity import (
    AffinityMap,
    Device,
    MapTooLarge,
    Pool,
    Role,
    build_affinity_map,
    decode,
    encode,
)
from hwprobe.binding import HostShare, NumaBinding
from hwprobe.hardware import Cpu, Finding, Gpu, Hardware, Memory, Nic, NumaNode
from hwprobe.merging import merge
from hwprobe.probing import probe
from hwprobe.profile import CpuProfile, GpuProfile, ProfileError, ResourceProfile, load_profile
from hwprobe.roofline import Kind, Roofline

__all__ = [
    "AffinityMap",
    "Cpu",
    "CpuProfile",
    "Device",
    "Finding",
    "Gpu",
    "GpuProfile",
    "Hardware",
    "HostShare",
    "Kind",
    "MapTooLarge",
    "Memory",
    "Nic",
    "NumaBinding",
    "NumaNode",
    "Pool",
    "ProfileError",
    "ResourceProfile",
    "Role",
    "Roofline",
    "build_affinity_map",
    "decode",
    "encode",
    "load_profile",
    "merge",
    "probe",
]
