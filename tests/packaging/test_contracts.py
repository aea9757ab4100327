"""The contract that confines a library to its wrappers sees who imports it, wherever that is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.packaging.contracts import outsiders
from tests.packaging.support import ROOT, run

CONFIGURATION = """
[importlinter]
root_package = shop
include_external_packages = True
contract_types =
    confined: tests.packaging.contracts.ConfinedContract

[importlinter:contract:heavy]
name = zmq stays in the wrappers
type = confined
library = zmq
importers =
    shop.wrap_*
"""
LINT = "from importlinter.cli import lint_imports_command as lint; lint()"


def lint(folder: Path) -> tuple[int, str]:
    (folder / "contracts.ini").write_text(CONFIGURATION)
    command: list[str | Path] = [sys.executable, "-c", LINT, "--no-cache", "--no-logo", "contracts.ini"]
    done = run(command, cwd=folder, env={"PYTHONPATH": f"{folder}:{ROOT}"})
    return done.returncode, " ".join(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).split())


def make_shop(folder: Path, importer: str) -> Path:
    (folder / "shop").mkdir()
    (folder / "shop" / "__init__.py").write_text("")
    (folder / "shop" / importer).write_text("def late() -> None:\n    import zmq.asyncio\n")
    return folder


def test_a_wrapper_may_import_its_library(tmp_path: Path) -> None:
    code, said = lint(make_shop(tmp_path, "wrap_sockets.py"))
    assert code == 0, said


def test_another_module_may_not_even_inside_a_function(tmp_path: Path) -> None:
    code, said = lint(make_shop(tmp_path, "till.py"))
    assert code == 1
    assert "shop.till imports zmq; only shop.wrap_* may" in said


def test_patterns_match_whole_names() -> None:
    assert outsiders(["a.b", "a.bc", "x.a.b"], ["a.b"]) == ["a.bc", "x.a.b"]
    assert outsiders(["a.vllm_engine", "a.vllm_host.b", "a.torch_engine"], ["a.vllm_*"]) == ["a.torch_engine"]
