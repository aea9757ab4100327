"""Know the hardware: probe a host, and map its devices to what they are good for.

    >>> from hwprobe import build_affinity_map, probe
    >>> affinity = build_affinity_map(probe())
    >>> affinity.cores >= 1
    True

Depends on psutil, msgspec and (where there are GPUs) nvidia-ml-py; on no other package of this project.
"""

from hwprobe.affinity import AffinityMap, MapTooLarge, Pool, build_affinity_map, decode, encode
from hwprobe.binding import HostShare, NumaBinding
from hwprobe.devices import Device, Role, TaskKind
from hwprobe.gpu import Clocks, Ecc, Gpu, GpuPath, GpuProcess, GpuSlice, NicPath, PcieLink, Power, Rates
from hwprobe.hardware import Cache, Cpu, Disk, Finding, Hardware, HugePages, Kernel, Memory, Nic, NumaNode
from hwprobe.merging import merge
from hwprobe.probing import probe
from hwprobe.profile import CpuProfile, GpuProfile, ProfileError, ResourceProfile, load_profile
from hwprobe.roofline import Kind, Roofline

__all__ = [
    "AffinityMap",
    "Cache",
    "Clocks",
    "Cpu",
    "CpuProfile",
    "Device",
    "Disk",
    "Ecc",
    "Finding",
    "Gpu",
    "GpuPath",
    "GpuProcess",
    "GpuProfile",
    "GpuSlice",
    "Hardware",
    "HostShare",
    "HugePages",
    "Kernel",
    "Kind",
    "MapTooLarge",
    "Memory",
    "Nic",
    "NicPath",
    "NumaBinding",
    "NumaNode",
    "PcieLink",
    "Pool",
    "Power",
    "ProfileError",
    "Rates",
    "ResourceProfile",
    "Role",
    "Roofline",
    "TaskKind",
    "build_affinity_map",
    "decode",
    "encode",
    "load_profile",
    "merge",
    "probe",
]
