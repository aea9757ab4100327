"""Gymnasium's FrozenLake as a text game of few tokens.

Invariant: the dynamics are Gymnasium's own (its transition table steps the game); this module only writes positions
as text and reads actions from it.

The first observation shows the map row by row and the position, later ones the position alone, as a column's letter
and a row's number; a walk reads ::

    SFFF FHFH FFFH HFFG
    a1 R b1 D ...

(without the blanks). With a byte-level tokenizer a turn costs three tokens, the action included, the whole walk stays
in view, and the two tokens before every action are the position: a policy from random weights learns this in about
half the steps that a longer form such as ``0,1>`` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

from gymnasium import Env
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv

from actors.env.protocol import Observation, Step

ACTIONS = ("L", "D", "R", "U")
"""In Gymnasium's order: the index of a letter is the action's number."""

_NUMBER = {letter: number for number, letter in enumerate(ACTIONS)}


class FrozenLake:
    """Walk from S to G over frozen tiles (F) without falling into a hole (H). The reward is 1 at the goal, else 0."""

    system_prompt = (
        "You walk on a frozen lake from S to G. F is safe ice, H is a hole that ends the game. The map is given row "
        "by row, from the top; your position is a column (a, b, ... from the left) and a row (1, 2, ... from the "
        "top). Answer with one letter: L (left), D (down), R (right) or U (up)."
    )

    def __init__(self, map_name: str = "4x4", map: Sequence[str] | None = None, slippery: bool = False) -> None:
        """``map`` gives the rows explicitly, e.g. ``["SF", "HG"]``, and then ``map_name`` is not used.

        Raises ``ValueError`` for a map that cannot be played.
        """
        rows = _named_map(map_name) if map is None else _checked_map(map)
        self._columns = len(rows[0])
        self._map = " ".join(rows)
        self._goals = {index for index, tile in enumerate("".join(rows)) if tile == "G"}
        self._lake: Env[int, int] = FrozenLakeEnv(desc=rows, is_slippery=slippery)
        self._here = [self._position(state) for state in range(len(rows) * self._columns)]

    def reset(self, task: int) -> Observation:
        """All tasks share the map; the task seeds the slips (and the start, where a map has several S)."""
        state, _ = self._lake.reset(seed=task)
        self._state = int(state)
        return Observation(f"{self._map}\n{self._here[self._state].text}", ACTIONS)

    def step(self, action: str) -> Step:
        """Move; text that is none of the four letters wastes the turn and repeats the position."""
        number = _NUMBER.get(action.strip().upper())
        if number is None:
            return Step(self._here[self._state])
        state, reward, terminated, _, _ = self._lake.step(number)
        self._state = int(state)
        return Step(
            self._here[self._state],
            reward=float(reward),
            terminated=bool(terminated),
            success=self._state in self._goals if terminated else None,
        )

    def close(self) -> None:
        """Release Gymnasium's resources."""
        self._lake.close()

    def _position(self, state: int) -> Observation:
        row, column = divmod(state, self._columns)
        return Observation(f"{ascii_lowercase[column]}{row + 1}", ACTIONS)


def _named_map(name: str) -> list[str]:
    if name not in MAPS:
        raise ValueError(f"map_name: expected one of {', '.join(sorted(MAPS))}, found {name!r}")
    return list(MAPS[name])


def _checked_map(rows: Sequence[str]) -> list[str]:
    if isinstance(rows, str) or not rows or not all(isinstance(row, str) and row for row in rows):
        raise ValueError(f"map: expected a list of rows such as [SF, HG], found {rows!r}")
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"map: expected rows of one length, found lengths {[len(row) for row in rows]}")
    if len(rows[0]) > len(ascii_lowercase):
        raise ValueError(f"map: expected at most {len(ascii_lowercase)} columns, found {len(rows[0])}")
    tiles = set("".join(rows))
    if not tiles <= set("SFHG"):
        raise ValueError(f"map: expected only the tiles S, F, H and G, found {sorted(tiles - set('SFHG'))}")
    for tile, meaning in (("S", "start"), ("G", "goal")):
        if tile not in tiles:
            raise ValueError(f"map: expected at least one {meaning} ({tile}), found none in {list(rows)}")
    return list(rows)
