"""Which problems are held out, told by what they are rather than by the seed that drew them.

Invariant: two tasks that pose the same problem are both for training or both held out, so success on held-out tasks
is success on problems that were never trained on. Two seeds often draw the same small map or sum; the split by seed
alone (``actors.env.protocol``) would let them meet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from actors.env.protocol import is_held_out

HELD_OUT_SHARE = 0.2
"""Of all problems that an environment can draw, about this share is never trained on."""

MOST_DRAWS = 1000
"""Redrawing this often in vain has a probability below 1e-90: a generator that needs more draws only one problem."""


class OneSided(ValueError):
    """A generator whose problems all fall on the wrong side of the split."""


def draws(task: int) -> Iterator[int]:
    """Seeds to draw ``task``'s problem with, until one is on the task's side: the task itself, then others that
    depend on it alone. Raises ``OneSided`` after ``MOST_DRAWS``."""
    yield task
    for attempt in range(1, MOST_DRAWS):
        digest = hashlib.blake2b(b"%d/%d" % (task, attempt), digest_size=4).digest()
        yield int.from_bytes(digest, "big") >> 1
    raise OneSided(
        f"task {task}: {MOST_DRAWS} problems were drawn and none is "
        f"{'held out' if is_held_out(task) else 'for training'}: the generator draws too few different ones to split"
    )


def on_the_right_side(task: int, problem: str) -> bool:
    """Whether ``problem`` may be posed by ``task``."""
    return held_out_by_content(problem) == is_held_out(task)


def held_out_by_content(problem: str) -> bool:
    """Whether training must never see ``problem``: any text that tells it from others, the same for equal ones."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2.0**64
