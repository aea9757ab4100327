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

With ``ways`` a position is followed by what a walker sees who looks around: an arrow for each neighbouring tile that
can be walked on, in the order of the actions, a dot for a hole or the edge: ``a1.v>.``, then ``b1<.>.``. It tells
nothing that the map does not, and not which way leads to the goal. Each direction has a character of its own, so that
a small policy need not learn to count places first: with the tiles themselves (``a1#FF#``) it still took the same way
over every map after 60 steps, when with arrows it went around most holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

from gymnasium import Env
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from actors.env.frozenlake_maps import RandomMaps, checked_map, named_map
from actors.env.protocol import Observation, Step

ACTIONS = ("L", "D", "R", "U")
"""In Gymnasium's order: the index of a letter is the action's number."""

_NUMBER = {letter: number for number, letter in enumerate(ACTIONS)}
_WAYS = {"<": (0, -1), "v": (1, 0), ">": (0, 1), "^": (-1, 0)}  # rows and columns, in the order of the actions


class FrozenLake:
    """Walk from S to G over frozen tiles (F) without falling into a hole (H). The reward is 1 at the goal, else 0."""

    system_prompt = (
        "You walk on a frozen lake from S to G. F is safe ice, H is a hole that ends the game. The map is given row "
        "by row, from the top; your position is a column (a, b, ... from the left) and a row (1, 2, ... from the "
        "top). Answer with one letter: L (left), D (down), R (right) or U (up)."
    )

    def __init__(
        self,
        map_name: str = "4x4",
        map: Sequence[str] | None = None,
        slippery: bool = False,
        *,
        size: int = 4,
        frozen: float = 0.8,
        ways: bool = False,
    ) -> None:
        """``map_name`` is 4x4, 8x8 or random: a map for each task, ``size`` x ``size``, each tile but the corners
        frozen with probability ``frozen``. ``map`` gives the rows explicitly, e.g. ``["SF", "HG"]``, and then
        ``map_name`` is not used.

        Raises ``ValueError`` for a map that cannot be played.
        """
        self._slippery = slippery
        self._ways = ways
        if ways:
            self.system_prompt += (
                " After the position come the ways that are safe: <, v, > and ^, a dot for each other."
            )
        self._maps = RandomMaps(size, frozen) if map is None and map_name == "random" else None
        self._lake: Env[int, int] | None = None
        if self._maps is None:
            self._lay(named_map(map_name) if map is None else checked_map(map))

    def reset(self, task: int) -> Observation:
        """The task seeds the map if that is random, the slips, and the start where a map has several S."""
        if self._maps is not None:
            self._lay(self._maps.draw(task))
        state, _ = self._laid().reset(seed=task)
        self._state = int(state)
        return Observation(f"{' '.join(self._rows)}\n{self._here[self._state].text}", ACTIONS)

    def step(self, action: str) -> Step:
        """Move; text that is none of the four letters wastes the turn and repeats the position."""
        number = _NUMBER.get(action.strip().upper())
        if number is None:
            return Step(self._here[self._state])
        state, reward, terminated, _, _ = self._laid().step(number)
        self._state = int(state)
        return Step(
            self._here[self._state],
            reward=float(reward),
            terminated=bool(terminated),
            success=self._on("G") if terminated else None,
        )

    def close(self) -> None:
        """Release Gymnasium's resources."""
        if self._lake is not None:
            self._lake.close()

    def _lay(self, rows: list[str]) -> None:
        """Play on this map from now on."""
        self.close()
        self._rows = rows
        self._lake = FrozenLakeEnv(desc=rows, is_slippery=self._slippery)
        self._here = [self._position(*self._place(state)) for state in range(len(rows) * len(rows[0]))]

    def _laid(self) -> Env[int, int]:
        if self._lake is None:
            raise RuntimeError("step: expected reset before it, since the task chooses the map")
        return self._lake

    def _place(self, state: int) -> tuple[int, int]:
        return divmod(state, len(self._rows[0]))

    def _on(self, tile: str) -> bool:
        row, column = self._place(self._state)
        return self._rows[row][column] == tile

    def _position(self, row: int, column: int) -> Observation:
        ways = "".join(self._way(arrow, row, column) for arrow in _WAYS) if self._ways else ""
        return Observation(f"{ascii_lowercase[column]}{row + 1}{ways}", ACTIONS)

    def _way(self, arrow: str, row: int, column: int) -> str:
        down, right = _WAYS[arrow]
        y, x = row + down, column + right
        inside = 0 <= y < len(self._rows) and 0 <= x < len(self._rows[0])
        return arrow if inside and self._rows[y][x] != "H" else "."
