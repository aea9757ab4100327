"""Import paths beside a job file."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.env.importing import ImportFailed, load_attribute


@pytest.fixture(autouse=True)
def restored_imports() -> Iterator[None]:
    """Each test sees the modules and the path of the start."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_module_beside_the_job_file_is_found_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "mine_a.py").write_text("import mine_b\nclass Outer:\n    value = mine_b.value\n")
    (tmp_path / "mine_b.py").write_text("value = 41\n")
    assert load_attribute("mine_a:Outer", tmp_path).value == 41
    assert load_attribute("mine_a:Outer.value", tmp_path) == 41


def test_a_dotted_module_and_an_installed_one_are_found(tmp_path: Path) -> None:
    package = tmp_path / "mine_package" / "games"
    package.mkdir(parents=True)
    (package / "guess.py").write_text("answer = 7\n")
    (tmp_path / "mine_package" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from . import guess\n")
    assert load_attribute("mine_package.games.guess:answer", tmp_path) == 7
    assert load_attribute("json:dumps", tmp_path) is json.dumps


def test_the_same_path_gives_the_same_object_twice(tmp_path: Path) -> None:
    (tmp_path / "mine_once.py").write_text("class Thing: pass\n")
    assert load_attribute("mine_once:Thing", tmp_path) is load_attribute("mine_once:Thing", tmp_path)


def test_the_directory_is_last_on_the_path_and_only_if_something_came_from_it(tmp_path: Path) -> None:
    before = list(sys.path)
    load_attribute("json:dumps", tmp_path)
    assert sys.path == before
    (tmp_path / "mine_c.py").write_text("x = 1\n")
    load_attribute("mine_c:x", tmp_path)
    load_attribute("mine_c:x", tmp_path)
    assert sys.path == [*before, str(tmp_path)]


def test_a_file_named_like_a_module_in_use_is_refused_not_mixed_up(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("dumps = None\n")
    with pytest.raises(ImportFailed, match=r"json\.py has the name of a module that is already in use .*: rename it"):
        load_attribute("json:dumps", tmp_path)
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("content", "path", "message"),
    [
        ("", "my env:Thing", "expected an import path such as my_env:MyEnvironment"),
        ("", "mine_d", "expected an import path such as my_env:MyEnvironment"),
        ("", "absent:Thing", r"no module 'absent': looked for absent\.py in /.*, then among the installed packages"),
        ("", "mine_d.sub:Thing", r"no module 'mine_d\.sub': looked for mine_d/sub\.py in "),
        (
            "class Right: pass\nfrom json import dumps",
            "mine_d:Wrong",
            r"mine_d\.py has no 'Wrong' \(it defines Right\)",
        ),
        (
            "import absent_helper",
            "mine_d:T",
            r"importing it failed: ModuleNotFoundError: No module named 'absent_helper'",
        ),
        (
            "x = 1\n1 / 0",
            "mine_d:x",
            r"importing it failed: ZeroDivisionError: division by zero \(mine_d\.py, line 2\)",
        ),
        ("def f(:\n", "mine_d:f", r"importing it failed: SyntaxError: invalid syntax \(mine_d\.py, line 1\)"),
        ("raise SystemExit(3)", "mine_d:f", r"importing it failed: SystemExit: 3 \(mine_d\.py, line 1\)"),
    ],
)
def test_a_path_that_leads_nowhere_is_one_line(tmp_path: Path, content: str, path: str, message: str) -> None:
    (tmp_path / "mine_d.py").write_text(content)
    with pytest.raises(ImportFailed, match=message) as caught:
        load_attribute(path, tmp_path)
    assert "\n" not in str(caught.value)
    assert path in str(caught.value)


def test_a_module_that_failed_can_be_mended_and_loaded(tmp_path: Path) -> None:
    module = tmp_path / "mine_e.py"
    module.write_text("1 / 0\n")
    with pytest.raises(ImportFailed):
        load_attribute("mine_e:x", tmp_path)
    module.write_text("x = 'mended'\n")
    assert load_attribute("mine_e:x", tmp_path) == "mended"
