"""From a job's environment section to an environment."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.env.catalogue import EnvironmentUnavailable, make_environment
from actors.env.frozenlake import FrozenLake
from actors.settings import EnvironmentSettings

USERS = """
from pathlib import Path
from actors.env.protocol import Observation, Step

class Game:
    def __init__(self, size: int, names: tuple[str, ...] = (), where: Path = Path("."), other: object = None) -> None:
        if size < 0:
            raise ValueError(f"size must not be negative:\\n{size}")
        self.size, self.names, self.where, self.other = size, names, where, other
    def reset(self, task): return Observation("x")
    def step(self, action): return Step(Observation("y"))

def make_game(size: int = 3): return Game(size)

class Half:
    def reset(self, task): return Observation("x")

class Prompting(Game):
    def system_prompt(self): return "rules"

number = 3
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "catalogue_users.py").write_text(USERS)
    sys.modules.pop("catalogue_users", None)
    return tmp_path


def make(base: Path, name: str, **options: Any) -> Any:
    return make_environment(EnvironmentSettings(name=name, options=options), base)


def test_a_name_of_the_catalogue_makes_that_environment(tmp_path: Path) -> None:
    lake = make(tmp_path, "frozenlake", map=["SF", "FG"])
    assert isinstance(lake, FrozenLake)
    assert lake.reset(0).text == "SF FG\na1"


def test_a_users_class_or_function_is_called_with_the_options_in_their_declared_types(base: Path) -> None:
    game = make(base, "catalogue_users:Game", size=2, names=["a", "b"], where="/tmp", other={"k": 1})
    assert (game.size, game.names, game.where, game.other) == (2, ("a", "b"), Path("/tmp"), {"k": 1})
    assert make(base, "catalogue_users:make_game", size=5).size == 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("frozen", {}, "environment.name: expected one of frozenlake, reasoning-gym, reasoning-gym-calculator or "),
        ("catalogue_users:Nope", {}, "environment.name: 'catalogue_users:Nope': "),
        ("catalogue_users:number", {}, "environment.name: catalogue_users:number is a int; expected a class"),
        ("catalogue_users:Half", {}, "environment.name: catalogue_users:Half makes a Half, which has no method step()"),
        ("catalogue_users:Prompting", {"size": 1}, "environment.name: Prompting.system_prompt: expected a str"),
        ("catalogue_users:Game", {}, "environment.options: catalogue_users:Game: missing a required argument: 'size'"),
        (
            "frozenlake",
            {"slipery": True},
            "environment.options: frozenlake: got an unexpected keyword argument 'slipery' "
            "(it takes: map_name, map, slippery, size, frozen, ways)",
        ),
        ("frozenlake", {"slippery": "yes"}, "environment.options.slippery: expected `bool`, got `str`"),
        (
            "catalogue_users:Game",
            {"size": 1, "names": ["a", 2]},
            "environment.options.names: expected `str`, got `int`",
        ),
        ("frozenlake", {"map_name": "9x9"}, "environment.options: frozenlake refused them: ValueError: map_name: "),
        (
            "catalogue_users:Game",
            {"size": -1},
            "refused them: ValueError: size must not be negative: -1 (catalogue_users",
        ),
    ],
)
def test_what_cannot_be_made_is_one_line_that_names_the_key(
    base: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvironmentUnavailable) as caught:
        make(base, name, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_naming_environments_imports_none_of_them() -> None:
    heavy = ("torch", "gymnasium", "transformers")
    code = f"import sys, actors.env.workbench; print([name for name in {heavy} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == "[]"
