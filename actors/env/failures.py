"""What went wrong in a user's code, told briefly.

Invariant: a description is bounded in size, names the user's file and line, and leaves out the frames that are ours.
"""

from __future__ import annotations

import traceback
from pathlib import Path

_OURS = str(Path(__file__).resolve().parent.parent)
_FRAMES = 6
_CHARACTERS = 2000

UserError = (Exception, SystemExit)
"""What a call into a user's code is guarded against: anything that it may raise, ``sys.exit`` included. Only an
interrupt from outside passes through."""


def one_line(error: BaseException) -> str:
    """``ValueError: bad size (my_env.py, line 12)``"""
    text = " ".join(str(error).split())
    head = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = _user_frames(error)
    if not frames:
        return head[:_CHARACTERS]
    return f"{head[:_CHARACTERS]} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def short_traceback(error: BaseException) -> str:
    """The innermost frames of the user's code and the error, as Python prints them."""
    frames = "".join(traceback.format_list(_user_frames(error)[-_FRAMES:]))
    last = "".join(traceback.format_exception_only(error)).rstrip()
    return f"{frames[-_CHARACTERS:]}{last[:_CHARACTERS]}"


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """From the first frame outside this package's own plumbing on: environments that ship with it count as code
    that can fail, so their frames are kept once they were called."""
    frames = list(traceback.extract_tb(error.__traceback__))
    while frames and (frames[0].filename.startswith(_OURS) or "importlib" in frames[0].filename):
        frames.pop(0)
    return frames
