"""Every package that ``bin/setup`` may install is pinned here to the digests of the files that fit its profile.

Usage (``uv`` is the only need beyond the development environment: ``pip install uv==0.13.9``)::

    .venv/bin/python requirements/lock.py            # all profiles
    .venv/bin/python requirements/lock.py cpu light  # some

``PROFILE.in`` holds what people edit; ``PROFILE.txt`` is written from it. uv resolves from metadata alone (nothing is
installed) and lists each release's files; the digests of those that a profile's platforms can install are kept.
torch's CPU builds live on an index of their own, whose digests are in ``torch-cpu.sha256`` (as ``sha256sum`` prints
them): those lines become the pins of torch in the profiles without a GPU.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

HERE = Path(__file__).resolve().parent
OLDEST_PYTHON = "3.11"
# glibc 2.31: Debian 11, Ubuntu 20.04 and later.
GLIBC = [(2, minor) for minor in range(31, 4, -1)]
LEGACY = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}
MACOS = [(major, minor) for major in range(14, 9, -1) for minor in range(16, -1, -1)]


class Profile(NamedTuple):
    """What one requirements file is for: its platforms, and how it is resolved."""

    pythons: tuple[tuple[int, int], ...]
    platforms: tuple[str, ...]  # "linux_x86_64", "linux_aarch64", "darwin_arm64"
    closed: bool = False  # every package is already listed: resolve nothing
    torch: str = ""  # from where: "" is the package index, "table" is torch-cpu.sha256, "none" leaves it out
    constraints: tuple[str, ...] = ()  # profiles whose pins hold here too
    overrides: tuple[str, ...] = ()  # versions that win over what a package asks for
    sources: tuple[str, ...] = ()  # packages without wheels: left to the profile that is made of sources
    source: bool = False  # packages are installed from their sources


ANYWHERE = ("linux_x86_64", "linux_aarch64", "darwin_arm64")
PYTHONS = ((3, 11), (3, 12), (3, 13))
PROFILES = {
    "cpu": Profile(PYTHONS[:1], ("linux_x86_64",), closed=True, torch="table"),
    "gpu": Profile(PYTHONS[:2], ("linux_x86_64",)),
    "light": Profile(PYTHONS, ANYWHERE, torch="table", constraints=("cpu",)),
    "dev": Profile(
        PYTHONS,
        ANYWHERE,
        torch="none",
        constraints=("cpu",),
        overrides=("protobuf ; sys_platform == 'never'",),  # every profile has it, but not all have the same version
    ),
    "smollm2": Profile(
        PYTHONS,
        ANYWHERE,
        torch="none",
        constraints=("cpu", "dev"),
        overrides=("tabulate==0.10.0",),  # reasoning-gym asks for 0.9.0, the profile for GPUs has this one
        sources=("cellpylib", "pycosat", "zss"),
    ),
    "smollm2-source": Profile(PYTHONS, ANYWHERE, closed=True, source=True),
}


class LockError(RuntimeError):
    """A profile that cannot be pinned as asked."""


def platform_tags(platform: str) -> list[str]:
    """Wheel platform tags that ``platform`` installs, best first."""
    system, _, machine = platform.partition("_")
    if system == "darwin":
        return [f"macosx_{major}_{minor}_{kind}" for major, minor in MACOS for kind in (machine, "universal2")]
    tags: list[str] = []
    for version in GLIBC:
        tags.append(f"manylinux_{version[0]}_{version[1]}_{machine}")
        if version in LEGACY:
            tags.append(f"{LEGACY[version]}_{machine}")
    return [*tags, f"linux_{machine}"]


def targets(profile: Profile) -> Iterator[tuple[dict[str, str], list[Tag]]]:
    """Each (marker environment, installable tags, best first) of a profile."""
    for python in profile.pythons:
        for platform in profile.platforms:
            system, _, machine = platform.partition("_")
            version = f"{python[0]}.{python[1]}"
            environment = {
                "python_version": version,
                "python_full_version": f"{version}.0",
                "sys_platform": system,
                "platform_system": system.capitalize(),
                "platform_machine": machine,
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
                "os_name": "posix",
            }
            tags = platform_tags(platform)
            installable = [
                *cpython_tags(python, platforms=tags),
                *compatible_tags(python, f"cp{python[0]}{python[1]}", tags),
            ]
            yield environment, installable


def best_wheel(wheels: Iterable[str], installable: list[Tag]) -> str | None:
    """The file that pip would choose among ``wheels``, or None if it can install none of them."""
    rank = {tag: place for place, tag in enumerate(installable)}
    found: list[tuple[int, str]] = []
    for name in wheels:
        places = [rank[tag] for tag in parse_wheel_filename(name)[3] if tag in rank]
        if places:
            found.append((min(places), name))
    return min(found)[1] if found else None


def digests(package: dict[str, Any], profile: Profile) -> tuple[list[str], bool]:
    """Digests of the files that the profile's platforms install, and whether a marker spares one of them."""
    if profile.source:
        return [package["sdist"]["hashes"]["sha256"]], False
    files = {wheel["url"].rsplit("/", 1)[1].replace("%2B", "+"): wheel for wheel in package.get("wheels", [])}
    marker = Marker(package["marker"]) if "marker" in package else None
    kept: set[str] = set()
    spared = False
    for environment, installable in targets(profile):
        if marker is not None and not marker.evaluate(dict(environment)):
            spared = True
            continue
        best = best_wheel(files, installable)
        if best is None:
            where = f"{environment['sys_platform']} {environment['platform_machine']}"
            raise LockError(
                f"{package['name']}=={package['version']} has no wheel for Python {environment['python_version']} on "
                f"{where}, and nothing is built from source: pin another version, or leave it out of this profile"
            )
        kept.add(files[best]["hashes"]["sha256"])
    return sorted(kept), spared


def pinned_torch(profile: Profile) -> list[str]:
    """torch's lines, from the table of its CPU builds: "+cpu" on Linux, the plain version on macOS."""
    entries = [line.split() for line in (HERE / "torch-cpu.sha256").read_text().splitlines()]
    table = {name: digest for digest, name in entries}
    kept: dict[str, set[str]] = {}
    for environment, installable in targets(profile):
        best = best_wheel(table, installable)
        if best is None:
            raise LockError(f"torch-cpu.sha256 lists no wheel for {environment}: add its line")
        version = str(parse_wheel_filename(best)[1])
        marker = f"torch=={version} ; sys_platform == '{environment['sys_platform']}'"
        kept.setdefault(marker, set()).add(table[best])
    return [entry(pin, sorted(hashes)) for pin, hashes in sorted(kept.items())]


def entry(pin: str, hashes: list[str]) -> str:
    return " \\\n".join([pin, *(f"    --hash=sha256:{digest}" for digest in hashes)])


def written(name: str) -> list[str]:
    """The pins of ``name.in``, with what it includes, but without torch."""
    pins: list[str] = []
    for raw in (HERE / f"{name}.in").read_text().splitlines():
        line = raw.split("#")[0].strip()
        if line.startswith("-r "):
            pins += written(line.removeprefix("-r ").removesuffix(".in"))
        elif line and not line.startswith("torch=="):
            pins.append(line)
    return pins


def resolve(name: str, profile: Profile, scratch: Path) -> list[dict[str, Any]]:
    """Every package of a profile with its files, as uv finds them on the package index."""
    uv = shutil.which("uv")
    if uv is None:
        raise LockError("uv is not on the PATH: pip install uv==0.13.9")
    source, output = HERE / f"{name}.in", scratch / "pylock.toml"
    command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version", OLDEST_PYTHON]
    if profile.closed:
        command.append("--no-deps")
    if profile.torch:  # what depends on torch must not bring it in
        source = scratch / f"{name}.in"
        source.write_text("\n".join(written(name)))
        (scratch / "overrides").write_text("\n".join(["torch ; sys_platform == 'never'", *profile.overrides]) + "\n")
        command += ["--overrides", str(scratch / "overrides")]
    for other in profile.constraints:
        (scratch / f"{other}.constraints").write_text("\n".join(written(other)))
        command += ["--constraints", str(scratch / f"{other}.constraints")]
    command += ["--format", "pylock.toml", "--output-file", str(output), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise LockError(f"uv could not resolve {name}.in:\n{done.stderr}")
    packages: list[dict[str, Any]] = tomllib.loads(output.read_text())["packages"]
    return packages


def lock(name: str) -> None:
    """Write ``name.txt``."""
    profile = PROFILES[name]
    lines = [f"# Written by requirements/lock.py from {name}.in: edit that, not this."]
    if profile.torch == "table":
        lines += pinned_torch(profile)
    with tempfile.TemporaryDirectory() as scratch:
        packages = resolve(name, profile, Path(scratch))
    for package in packages:
        if (profile.torch and package["name"] == "torch") or package["name"] in profile.sources:
            continue
        hashes, spared = digests(package, profile)
        if hashes:
            marker = f" ; {package['marker']}" if spared else ""
            lines.append(entry(f"{package['name']}=={package['version']}{marker}", hashes))
    (HERE / f"{name}.txt").write_text("\n".join(lines) + "\n")
    print(f"{name}.txt: {len(lines) - 1} packages")


def main(argv: list[str]) -> int:
    unknown = sorted(set(argv) - set(PROFILES))
    if unknown:
        print(f"lock.py: no such profile: {', '.join(unknown)} (there are {', '.join(PROFILES)})", file=sys.stderr)
        return 2
    try:
        for name in argv or PROFILES:
            lock(name)
    except LockError as error:
        print(f"lock.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
