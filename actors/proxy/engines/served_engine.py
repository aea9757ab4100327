"""An engine that is a server, asked over HTTP: what servers of different interfaces have in common.

    add --> waiting --step, where there is room--> a stream in a thread of its own --tokens--> step --> Completion
                ^                                                       |
                +------------- load_weights, with the tokens so far ----+

Invariant: the tokens of every unfinished request are held here, and the server holds only what can be asked of it
again. What has come before ``load_weights`` begins has the old version; then every stream is closed before the server
is given anything, and the requests are asked anew as prompt + tokens so far.

A server goes on by itself between two calls of ``step``: what it samples meanwhile waits here.
"""

from __future__ import annotations

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.client import INTERNAL_SERVER_ERROR
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.proxy.engines.held import Asked, Held
from actors.proxy.engines.http_server import REFUSALS, RequestRefused, Server, ServerError, Stream
from actors.proxy.engines.protocol import (
    Begun,
    Completion,
    EngineLimits,
    EngineRefusal,
    FinishReason,
    GenerateRequest,
    LateRefusal,
)
from actors.proxy.engines.sampled import Ranked, Texts
from actors.proxy.engines.torch_weights import gather, policy_tensors, tensor_digest
from actors.proxy.engines.validation import check, check_score
from actors.proxy.engines.work import WorkMeter

if TYPE_CHECKING:
    import torch

WAIT_S = 0.05
"""How long a step waits for a server that has nothing to say."""

WHOLE_DISTRIBUTION = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Said with every request: what is left out a server takes from its model's ``generation_config.json`` or its own
preferences, and then samples from, and tells the log-probabilities of, another distribution than the policy's."""


@dataclass(frozen=True)
class Token:
    """One that a server has sampled."""

    id: int
    logprob: float
    ranked: Ranked | None  # the most probable ones, where they were asked for


@dataclass(frozen=True)
class Piece:
    """What one event of a stream says."""

    tokens: Sequence[Token]
    ended: str = ""  # why the server has ended the request, in its words


class ServedEngine(ABC):
    """See the module docstring; ``actors.proxy.engines.protocol.Engine`` for the methods."""

    masks = True
    """Whether the server samples from allowed tokens only, where a request says so."""
    unsaid = INTERNAL_SERVER_ERROR
    """The status of an error within an answer that has none."""

    def __init__(
        self,
        policy_dir: Path,
        *,
        url: str,
        key: str | None = None,
        max_sequences: int,
        max_model_len: int,
        seed: int = 0,
        texts: Texts | None = None,
    ) -> None:
        """Raises ``ServerError`` where no server answers, and as ``probe`` does."""
        self.policy_dir = policy_dir
        self.server = Server(url, key)
        longest = self.meet(max_model_len)
        vocabulary = int(json.loads((policy_dir / "config.json").read_text())["vocab_size"])
        self.limits = EngineLimits(max_sequences, longest, vocabulary, texts is not None, masks=self.masks)
        self.work = WorkMeter()
        self._texts = texts
        self._random = np.random.default_rng(seed)
        self._held: dict[str, Held] = {}
        self._by_submission: dict[int, Held] = {}
        self._submissions = 0
        self._said: SimpleQueue[tuple[int, Piece | ServerError]] = SimpleQueue()
        self._done: list[Completion] = []
        self._refused: list[LateRefusal] = []
        self._version: int | None = None
        self.probe()

    # ---- what an interface is ------------------------------------------------------------------------------------

    @abstractmethod
    def meet(self, longest: int) -> int:
        """See that the server is there; returns how long its sequences may be, at most ``longest``."""

    @abstractmethod
    def probe(self) -> None:
        """Ask of which distribution the server's log-probabilities are. Raises ``ServerError`` where they are not of
        the one that it samples from."""

    @abstractmethod
    def open(self, asked: Asked, name: str) -> Stream:
        """Called in the request's thread."""

    @abstractmethod
    def pieces(self, events: Iterator[Any], alternatives: int) -> Iterator[Piece]:
        """What a stream's events say. Called in the request's thread."""

    @abstractmethod
    def take_weights(self, version: int, arrived: list[tuple[str, torch.Tensor]]) -> None:
        """Have the server use these; it works on nothing."""

    @abstractmethod
    def ask_scores(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of tokens[1:]."""

    def check_temperature(self, apart: Callable[[float], float], remedy: str) -> None:
        """Two tokens' log-probabilities lie twice as far ``apart`` at temperature 0.5 as at 1 where temperature is in
        them. Raises ``ServerError`` where it is not."""
        cold, warm = apart(0.5), apart(1.0)
        if not math.isclose(cold, 2 * warm, rel_tol=1e-2, abs_tol=1e-3):
            raise ServerError(
                f"{self.server.url}: two tokens' log-probabilities lie {cold:.4g} apart at temperature 0.5 and "
                f"{warm:.4g} at 1, expected twice as much: they are not those of the distribution sampled from "
                f"({remedy})"
            )

    def told_error(self, error: Any, unsaid: int) -> ServerError:
        """What an answer's ``error`` says. ``unsaid``: its status, where it has none itself."""
        code = error.get("code") if isinstance(error, dict) else None
        kind = RequestRefused if (code if isinstance(code, int) else unsaid) in REFUSALS else ServerError
        return kind(f"{self.server.url}: {error}")

    # ---- the protocol --------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        check(request, self.limits)
        if request.request_id in self._held:
            raise EngineRefusal(f"request {request.request_id}: one with this id is already here")
        seed = int(self._random.integers(2**63)) if request.seed is None else request.seed
        self._held[request.request_id] = Held(request, seed, self._texts)

    def abort(self, request_id: str) -> Completion | None:
        self._take_all(wait_s=0.0)
        held = self._held.get(request_id)
        return None if held is None else self._finish(held, "aborted")

    def sampled(self, request_id: str, since: int) -> Begun | None:
        held = self._held.get(request_id)
        return None if held is None else held.sampled.since(since)

    def unfinished(self) -> int:
        return len(self._held) + len(self._done) + len(self._refused)

    def step(self) -> Sequence[Completion]:
        if self._version is None:
            return ()
        self._ask_for_more()
        self._take_all(wait_s=0.0 if self._done or self._refused else WAIT_S)
        if self._refused:
            raise self._refused.pop(0)
        done, self._done = self._done, []
        return done

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        self._take_all(wait_s=0.0)
        self._version = None
        for held in self._held.values():
            held.withdraw()
        self._by_submission.clear()
        arrived = gather(version, tensors, policy_tensors(self.policy_dir))
        self.take_weights(version, arrived)
        self._version = version
        return {name: tensor_digest(tensor) for name, tensor in arrived}

    def score(self, tokens: np.ndarray) -> np.ndarray:
        check_score(tokens, self.limits, self._version)
        if len(tokens) == 1:
            return np.empty(0, dtype=np.float32)
        return np.array(self.ask_scores(tokens.tolist()), dtype=np.float32)

    def forget(self, trajectory: str) -> None:  # noqa: B027  (of the protocol)
        """Nothing to do: servers keep prefixes by their own rules."""

    def close(self) -> None:
        self._version = None
        for held in self._held.values():
            held.withdraw()
        self._held.clear()
        self._by_submission.clear()
        self._done.clear()
        self._refused.clear()

    # ---- streams -------------------------------------------------------------------------------------------------

    def _ask_for_more(self) -> None:
        waiting = [held for held in self._held.values() if not held.submission]
        waiting.sort(key=lambda held: not held.request.urgent)
        for held in waiting[: max(0, self.limits.max_sequences - len(self._by_submission))]:
            self._submissions += 1
            held.submission = self._submissions
            self._by_submission[held.submission] = held
            arguments = (held, held.submission, held.asked())
            threading.Thread(target=self._read, args=arguments, name="engine-stream", daemon=True).start()

    def _read(self, held: Held, submission: int, asked: Asked) -> None:
        """In a thread of its own: pass on what the server says, to its end or until it is withdrawn."""
        try:
            stream = self.open(asked, f"{held.request.request_id}/{submission}")
            if not held.opened(submission, stream):
                stream.close()
                return
            for piece in self.pieces(self._events(stream), asked.logprobs):
                self._said.put((submission, piece))
            self._said.put((submission, self._error(held, "the answer ended before the request")))
        except ServerError as error:
            self._said.put((submission, error))
        except Exception as error:  # whatever else an answer may do to its reader: unsaid, the request would hang
            self._said.put((submission, self._error(held, f"cannot be read: {error!r}")))

    def _events(self, stream: Stream) -> Iterator[Any]:
        for event in stream.events():
            if "error" in event:
                raise self.told_error(event["error"], self.unsaid)
            yield event

    def _error(self, held: Held, words: str) -> ServerError:
        return ServerError(f"{self.server.url}: request {held.request.request_id}: {words}")

    def _take_all(self, *, wait_s: float) -> None:
        """Take in what servers have said; where that is nothing, wait so long for it."""
        try:
            submission, said = self._said.get(timeout=wait_s) if wait_s else self._said.get_nowait()
            while True:
                held = self._by_submission.get(submission)
                if held is not None:
                    self._take(held, said)
                submission, said = self._said.get_nowait()
        except Empty:
            return

    def _take(self, held: Held, said: Piece | ServerError) -> None:
        if isinstance(said, RequestRefused):
            self._refused.append(LateRefusal(held.request.request_id, str(said)))
            self._remove(held)
            return
        if isinstance(said, ServerError):
            raise said  # without its server an engine is dead: its requests go on elsewhere
        for token in said.tokens:
            if len(held.sampled) == (0 if held.request.begun is None else len(held.request.begun.tokens)):
                self.work.prefilled(len(held.request.prompt) + len(held.sampled))
            else:
                self.work.decoded(1, len(held.request.prompt) + len(held.sampled))
            held.sampled.add(token.id, token.logprob, self._version or 0)
            if token.ranked is not None:
                held.sampled.rank(token.ranked)
            reason = held.sampled.end()
            if reason is not None:
                self._done.append(self._finish(held, reason))
                return
        if said.ended:
            raise self._error(
                held,
                f"it was ended after {len(held.sampled)} tokens ({said.ended}), before a stop token, a stop string or "
                f"max_tokens={held.request.max_tokens}",
            )

    def _finish(self, held: Held, reason: FinishReason) -> Completion:
        self._remove(held)
        return held.sampled.completion(reason)

    def _remove(self, held: Held) -> None:
        del self._held[held.request.request_id]
        self._by_submission.pop(held.submission, None)
        held.withdraw()


def field(answer: Any, *path: str | int) -> Any:
    """What is there in a server's answer. Raises ``ServerError`` naming what is missing."""
    found = answer
    for step in path:
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError):
            raise ServerError(f"expected {'.'.join(map(str, path))} in the answer, found {str(answer)[:200]}") from None
    return found
