"""Backends that do what a tracker's library may do."""

from __future__ import annotations

import os
import sys
import threading

from coordinator.observe.tracking.protocol import Sitting


class Quiet:
    """Keeps nothing, and prints on the way."""

    def __init__(self, sitting: Sitting) -> None:
        print("hello from the library", sitting.name)

    def log(self, values: dict[str, float], version: int) -> None:
        print("version", version)

    def finish(self, outcome: str) -> None:
        print("bye")


class Unstartable(Quiet):
    def __init__(self, sitting: Sitting) -> None:
        raise ConnectionError(f"no server\nat {sitting.uri}")


class FailsAtThree(Quiet):
    def log(self, values: dict[str, float], version: int) -> None:
        if version == 3:
            raise OSError(28, "No space left on device")


class HangsAtThree(Quiet):
    def log(self, values: dict[str, float], version: int) -> None:
        if version == 3:
            threading.Event().wait()


class DiesAtThree(Quiet):
    def log(self, values: dict[str, float], version: int) -> None:
        if version == 3:
            print("cannot go on", file=sys.stderr, flush=True)
            os._exit(7)


class HangsAtTheEnd(Quiet):
    def finish(self, outcome: str) -> None:
        threading.Event().wait()


class Asks(Quiet):
    """Wants something of whoever sits at the terminal."""

    def __init__(self, sitting: Sitting) -> None:
        input("API key: ")
