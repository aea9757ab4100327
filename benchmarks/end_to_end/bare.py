"""The sides of the throughput benchmark without our proxy; ``benchmarks.end_to_end.serving`` says what they are.

Invariant: all are driven by the same loop with the same requests, under the rules of ``serving.Asker``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import zmq

from actors.core.launch import die_with_parent
from actors.policy import Qwen3Shape, write_config
from actors.proxy.engines import make_engine
from actors.proxy.engines.protocol import Completion, Engine, EngineLimits, GenerateRequest
from actors.settings import TrainSettings
from actors.trainer.backends import make_backend
from actors.trainer.rank import canary
from actors.weightsync.manifest import Manifest
from actors.weightsync.publisher import Snapshot
from benchmarks.end_to_end import task
from bus.codec import Decoder, Encoder

if TYPE_CHECKING:
    import torch

    from actors.trainer.backends.protocol import Backend

START_TIMEOUT_S = 300.0


class Load(msgspec.Struct, frozen=True):
    """What all sides are given to do."""

    requests: int = 32  # always under way, and the engine has as many places
    window_s: float = 3.0
    shape: Qwen3Shape = task.SHAPE  # with random weights

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(max_sequences=self.requests, max_model_len=64)


def request(index: int) -> GenerateRequest:
    """The ``index``-th."""
    prompt = np.frombuffer(task.prompt(index).encode(), np.uint8).astype(np.int32)
    length = task.COMPLETION_TOKENS - 15 + index * 7 % 31  # 32 on average; equal ones would all end in the same step
    return GenerateRequest(f"r{index}", f"r{index}", prompt, length, seed=index)


def first_version(directory: Path, shape: Qwen3Shape) -> tuple[Manifest, Snapshot, Backend]:
    """Random weights as version 0."""
    write_config(shape, directory)
    backend = make_backend(directory, seed=0, settings=TrainSettings(), dtype="float32", from_scratch=True)
    snapshot = Snapshot(backend.export())
    tokens = canary(shape.vocab_size, 0)
    return Manifest(0, "float32", snapshot.facts, tokens, backend.score(tokens)), snapshot, backend


def loaded(directory: Path, load: Load) -> Engine:
    """An engine with weights, in this process."""
    _, _, backend = first_version(directory, load.shape)
    limits = load.limits
    engine = make_engine(
        "vllm", directory, max_sequences=limits.max_sequences, max_model_len=limits.max_model_len, dtype="float32"
    )
    engine.load_weights(0, backend.export())
    return engine


def direct(directory: Path, load: Load) -> None:
    """The engine in this process, in a loop of its own."""
    drive(loaded(directory, load), load)


def pair(directory: Path, load: Load) -> None:
    """The engine in another process, in a loop of its own."""
    socket = zmq.Context().socket(zmq.PAIR)
    socket.rcvtimeo = int(START_TIMEOUT_S * 1000)
    endpoint = f"ipc://{directory}/pair"
    socket.bind(endpoint)
    words = [sys.executable, "-m", "benchmarks.end_to_end.serving", "engine", str(directory)]
    subprocess.Popen([*words, msgspec.json.encode(load).decode()])
    if not socket.poll(int(START_TIMEOUT_S * 1000)):
        raise RuntimeError(f"the engine process was not ready within {START_TIMEOUT_S:g} s")
    socket.recv()  # "ready"
    drive(Distant(socket), load)


def engine(directory: Path, load: Load) -> None:
    """The other process of ``pair``: take what has come, make a step, send what it finished."""
    die_with_parent()
    bare = loaded(directory, load)
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(f"ipc://{directory}/pair")
    socket.send(b"ready")
    encoder = Encoder()
    requests: Decoder[GenerateRequest] = Decoder(GenerateRequest)
    while True:
        while not bare.unfinished() or socket.poll(0):
            bare.add(requests.decode(socket.recv_multipart()))
        for completion in bare.step():
            socket.send_multipart(encoder.encode(completion))


class Distant:
    """What ``drive`` needs of an engine, at the other end of a socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._encoder = Encoder()
        self._completions: Decoder[Completion] = Decoder(Completion)
        self._unfinished = 0

    def add(self, request: GenerateRequest) -> None:
        self._unfinished += 1
        self._socket.send_multipart(self._encoder.encode(request))

    def step(self) -> Sequence[Completion]:
        self._unfinished -= 1
        return (self._completions.decode(self._socket.recv_multipart()),)

    def unfinished(self) -> int:
        return self._unfinished


def client(directory: Path, load: Load) -> None:
    """vLLM's core in another process, driven from a loop of this one."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from actors.proxy.engines.vllm_engine import VllmEngine  # noqa: PLC0415  (reads the environment)

    class Client(VllmEngine):
        """Weights as they are: vLLM's client cannot carry an iterator of tensors."""

        def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
            self._version = version
            return {}

    write_config(load.shape, directory)
    limits = load.limits
    engine = Client(directory, max_sequences=limits.max_sequences, max_model_len=limits.max_model_len, dtype="float32")
    engine.load_weights(0, ())
    try:
        drive(engine, load)
    finally:
        engine.close()


class Drivable(Protocol):
    """An engine, or what stands for one."""

    def add(self, request: GenerateRequest) -> None: ...

    def step(self) -> Sequence[Completion]: ...

    def unfinished(self) -> int: ...


def drive(engine: Drivable, load: Load) -> None:
    """One window a line, by the rules of ``Asker``: it begins with the first answer, and what is under way when it
    ends is finished before the other sides' windows."""
    added = 0
    for _ in sys.stdin:
        while engine.unfinished() < load.requests:
            engine.add(request(added))
            added += 1
        start, tokens = 0.0, 0
        while not start or time.perf_counter() - start < load.window_s:
            completions = engine.step()
            if start:
                tokens += sum(len(completion.tokens) for completion in completions)
            elif completions:
                start = time.perf_counter()
            for _ in completions:
                engine.add(request(added))
                added += 1
        rate = tokens / (time.perf_counter() - start)
        while engine.unfinished():
            engine.step()
        tell(rate)


def tell(rate: float) -> None:
    """Answer a line."""
    print(json.dumps({"rate": rate}), flush=True)
