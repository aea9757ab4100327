"""Maps for FrozenLake: named, given, or random with a part that is held out.

Invariant: a random map is held out or not by its content alone, and a task only ever draws maps of its own side. So no
map that measures success was ever trained on, although different tasks often draw equal maps (4x4 has only 16,384).
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

from gymnasium.envs.toy_text.frozen_lake import MAPS, generate_random_map

from actors.env.splits import OneSided, draws, held_out_by_content, on_the_right_side


def named_map(name: str) -> list[str]:
    """One of Gymnasium's own maps. Raises ``ValueError``."""
    if name not in MAPS:
        raise ValueError(f"map_name: expected one of {', '.join(sorted(MAPS))} or random, found {name!r}")
    return list(MAPS[name])


def checked_map(rows: Sequence[str]) -> list[str]:
    """``rows``, if they make a map that can be played. Raises ``ValueError``."""
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


class RandomMaps:
    """Gymnasium's generator: square, start and goal in opposite corners, each other tile frozen with a probability,
    redrawn until the goal can be reached, and here also until the map is on its task's side of the split."""

    def __init__(self, size: int, frozen: float) -> None:
        """Raises ``ValueError`` for values that cannot give maps for both sides."""
        if not 2 <= size <= len(ascii_lowercase):
            raise ValueError(f"size: expected 2 to {len(ascii_lowercase)} rows and columns, found {size}")
        if not 0 < frozen <= 1:
            raise ValueError(f"frozen: expected a probability above 0 and at most 1, found {frozen}")
        self._size, self._frozen = size, frozen

    def draw(self, task: int) -> list[str]:
        """The map of ``task``: the same every time. Raises ``ValueError`` where its side has none."""
        try:
            for seed in draws(task):
                rows: list[str] = generate_random_map(self._size, self._frozen, seed)
                if on_the_right_side(task, _puzzle(rows)):
                    break
        except OneSided as error:
            raise ValueError(
                f"size: {self._size}, frozen: {self._frozen}: {error}; use a larger size or another probability"
            ) from None
        return rows


def is_held_out_map(rows: Sequence[str]) -> bool:
    """Whether training must never see this map."""
    return held_out_by_content(_puzzle(rows))


def _puzzle(rows: Sequence[str]) -> str:
    """The same for a map and its mirror image along the main diagonal, which is the same puzzle with right and down
    exchanged."""
    mirrored = ["".join(column) for column in zip(*rows, strict=True)]
    return min(" ".join(rows), " ".join(mirrored))
