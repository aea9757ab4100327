"""An engine that samples nothing: one token a step, in a thread that the test can hold up between any two steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from actors.proxy.engines.protocol import Begun, Completion, EngineLimits, EngineRefusal, GenerateRequest, LateRefusal
from actors.proxy.engines.work import WorkMeter

if TYPE_CHECKING:
    import torch

HOLD_S = 10.0


class ScriptedEngine:
    """Every request takes ``max_tokens`` steps. ``log`` notes what was done to it, in order; ``gate`` holds ``step``
    up while it is closed, and ``in_step`` says that one is under way."""

    def __init__(self) -> None:
        self.limits = EngineLimits(max_sequences=8, max_model_len=16)
        self.work = WorkMeter()
        self.log: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()
        self.score_gate = threading.Event()
        self.score_gate.set()
        self.version = -1
        self.fails: str = ""  # name of the method that raises
        self.refuses_late: set[str] = set()  # requests that the next step refuses
        self.counts = False  # whether it counts what it computes
        self.closed = False
        self._left: dict[str, list[int]] = {}  # request -> versions of its tokens so far
        self._wanted: dict[str, int] = {}
        self.threads: set[str] = set()

    def _note(self, what: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.log.append(what)
        if self.fails and what.startswith(self.fails):
            raise RuntimeError(f"{self.fails}: device lost")

    def add(self, request: GenerateRequest) -> None:
        self._note(f"add {request.request_id}")
        if len(request.prompt) > self.limits.max_model_len:
            raise EngineRefusal(f"a prompt of {len(request.prompt)} tokens, at most {self.limits.max_model_len} fit")
        self._left[request.request_id] = []
        self._wanted[request.request_id] = request.max_tokens

    def abort(self, request_id: str) -> Completion | None:
        self._note(f"abort {request_id}")
        versions = self._left.pop(request_id, None)
        return None if versions is None else _completion(request_id, versions, "aborted")

    def sampled(self, request_id: str, since: int) -> Begun | None:
        versions = self._left.get(request_id, [])
        if len(versions) <= since:
            return None
        now = _completion(request_id, versions, "aborted")
        return Begun(now.tokens[since:], now.logprobs[since:], now.versions[since:])

    def step(self) -> Sequence[Completion]:
        self._note("step")
        self.in_step.set()
        self.gate.wait(HOLD_S)
        self.in_step.clear()
        for id_ in self.refuses_late & self._left.keys():
            del self._left[id_]
            raise LateRefusal(id_, "not by this server")
        done = []
        if self.counts:
            self.work.decoded(len(self._left), 0)
        for id_, versions in list(self._left.items()):
            versions.append(self.version)
            if len(versions) == self._wanted[id_]:
                done.append(_completion(id_, self._left.pop(id_), "length"))
        return done

    def unfinished(self) -> int:
        return len(self._left)

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        self._note(f"load {version}")
        self.version = version
        return {name: f"digest of {name}" for name, _ in tensors}

    def score(self, tokens: np.ndarray) -> np.ndarray:
        self._note("score")
        self.score_gate.wait(HOLD_S)
        return np.full(len(tokens) - 1, -float(self.version), np.float32)

    def forget(self, trajectory: str) -> None:
        self._note(f"forget {trajectory}")

    def close(self) -> None:
        self.closed = True


def _completion(id_: str, versions: list[int], reason: str) -> Completion:
    count = len(versions)
    return Completion(
        id_,
        np.arange(count, dtype=np.int32),
        np.full(count, -0.5, np.float32),
        np.array(versions, np.int32),
        reason,  # type: ignore[arg-type]
    )
