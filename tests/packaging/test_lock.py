"""Which of a release's files a profile is pinned to."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest

from tests.packaging.support import ROOT


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "requirements" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def release(*names: str, **more: Any) -> dict[str, Any]:
    """A release as a lock file of PEP 751 lists it; the digest of a file is its name."""
    wheels = [{"url": f"https://index/{name}", "hashes": {"sha256": name}} for name in names]
    return {"name": "thing", "version": "1", "wheels": wheels, **more}


LINUX = "thing-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
NEWER = "thing-1-cp311-cp311-manylinux_2_28_x86_64.whl"
TOO_NEW = "thing-1-cp311-cp311-manylinux_2_39_x86_64.whl"
MUSL = "thing-1-cp311-cp311-musllinux_1_2_x86_64.whl"
ABI3 = "thing-1-cp39-abi3-manylinux_2_17_x86_64.whl"
PURE = "thing-1-py3-none-any.whl"
OTHER_PYTHON = "thing-1-cp312-cp312-manylinux_2_17_x86_64.whl"


@pytest.mark.parametrize(
    ("offered", "kept"),
    [
        ([PURE], PURE),
        ([PURE, LINUX, MUSL, OTHER_PYTHON], LINUX),
        ([LINUX, NEWER, TOO_NEW], NEWER),
        ([ABI3, PURE], ABI3),
    ],
)
def test_the_file_that_pip_would_choose_is_kept(lock: ModuleType, offered: list[str], kept: str) -> None:
    assert lock.digests(release(*offered), lock.PROFILES["cpu"]) == ([kept], False)


@pytest.mark.parametrize("offered", [[], [TOO_NEW], [MUSL], [OTHER_PYTHON], ["thing-1-cp311-cp311-win_amd64.whl"]])
def test_a_release_that_would_have_to_be_built_is_refused(lock: ModuleType, offered: list[str]) -> None:
    with pytest.raises(lock.LockError, match=r"thing==1 has no wheel for Python 3\.11 on linux x86_64"):
        lock.digests(release(*offered), lock.PROFILES["cpu"])


def test_a_marker_spares_the_platforms_that_it_excludes(lock: ModuleType) -> None:
    only_mac = release("thing-1-cp311-abi3-macosx_11_0_arm64.whl", marker="sys_platform == 'darwin'")
    assert lock.digests(only_mac, lock.PROFILES["light"]) == (["thing-1-cp311-abi3-macosx_11_0_arm64.whl"], True)
    assert lock.digests(only_mac, lock.PROFILES["cpu"]) == ([], True)


def test_torch_is_the_cpu_build_on_linux_and_the_plain_one_on_macos(lock: ModuleType) -> None:
    mac, linux = lock.pinned_torch(lock.PROFILES["light"])
    assert mac.startswith("torch==2.13.0 ; sys_platform == 'darwin'")
    assert linux.startswith("torch==2.13.0+cpu ; sys_platform == 'linux'")
    assert mac.count("--hash=sha256:") == 3  # Python 3.11, 3.12 and 3.13
    assert linux.count("--hash=sha256:") == 6  # the same, on two architectures
