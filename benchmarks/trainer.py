"""What computing shared prefixes once saves in a training step, against computing every segment whole; and steps of
both backends beside a bare transformers loop (``benchmarks.trainer_speed``).

    python -m benchmarks.trainer             all cases
    python -m benchmarks.trainer --quick     few rounds of the smaller cases
    python -m benchmarks.trainer --json      one JSON object

Both ways run in this process on the same batch, in turn, as often as ``--rounds`` says; a figure is the ratio of their
fastest ``forward_backward``, packing included, in CPU seconds, so that what else the machine does hardly counts. Memory
is the process's peak beyond what it held before the call. Beside the speed-up stands the ratio of the tokens, for a
group of 8 that shares s of them 8 / (8 - 7 s): the speed-up where every token costs the same.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from actors.env.frozenlake import FrozenLake
from actors.policy import Qwen3Shape
from actors.settings import TrainSettings
from actors.trainer.backends.packing import Packer
from actors.trainer.backends.protocol import TrainBatch, TrainSequence
from actors.trainer.backends.torch_backend import TorchBackend
from actors.trajectory import FULL_VOCABULARY
from benchmarks import trainer_speed

MIDDLE: dict[str, Any] = Qwen3Shape(
    vocab_size=512, hidden_size=512, layers=4, heads=8, kv_heads=4, head_dim=64, intermediate_size=1536
).hugging_face_config()
# SmolLM2-135M's shape.
SMOL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
SPEEDS = {"torch_vs_transformers": 1.0, "megatron_vs_transformers": 0.75}
SMALL: dict[str, Any] = Qwen3Shape().hugging_face_config()


class Case(msgspec.Struct, frozen=True):
    """A policy and a batch for it."""

    name: str
    about: str
    config: dict[str, Any]
    batch: Callable[[], TrainBatch]
    rounds_factor: int = 1  # short steps are measured more often
    bound: float = float("nan")


class Reading(msgspec.Struct, frozen=True):
    """One case, measured both ways."""

    figure: str
    about: str
    speedup: float
    bound: float
    whole_s: float  # CPU seconds
    shared_s: float
    whole_tokens: int  # computed in a step, padding included
    shared_tokens: int
    whole_mb: float
    shared_mb: float


def group(rng: np.random.Generator, name: str, prompt: int, answer: int, vocabulary: int) -> list[TrainSequence]:
    """Eight members with the same random prompt and random answers."""
    shared = rng.integers(0, vocabulary, prompt)
    mask = np.repeat(np.array([0, 1], np.uint8), [prompt, answer])
    return [
        TrainSequence(
            ticket=f"{name}-{member}",
            tokens=np.concatenate([shared, rng.integers(0, vocabulary, answer)]).astype(np.int32),
            loss_mask=mask,
            logprobs=(-np.log(vocabulary) * mask).astype(np.float32),
            allowed=np.full(prompt + answer, FULL_VOCABULARY, np.int32),
            advantage=float(rng.normal()),
            temperature=1.0,
        )
        for member in range(8)
    ]


def groups(number: int, prompt: int, answer: int, vocabulary: int) -> TrainBatch:
    """``number`` groups of eight."""
    rng = np.random.default_rng(0)
    members = [group(rng, f"g{i}", prompt, answer, vocabulary) for i in range(number)]
    return TrainBatch(sequences=[member for each in members for member in each], allowed_sets=[])


def walks() -> TrainBatch:
    """64 random walks of at most 12 turns over FrozenLake's map, as the quick start's first step sees them."""
    rng, letters = np.random.default_rng(0), np.sort(np.frombuffer(b"LDRU", np.uint8)).astype(np.int32)
    sequences = []
    for walk in range(64):
        lake = FrozenLake()
        tokens = list(lake.reset(0).text.encode())
        mask: list[int] = []
        for _ in range(12):
            mask += [0] * (len(tokens) - len(mask)) + [1]
            tokens.append(int(rng.choice(letters)))
            step = lake.step(chr(tokens[-1]))
            if step.terminated:
                break
            tokens += step.observation.text.encode()
        loss_mask = np.array(mask + [0] * (len(tokens) - len(mask)), np.uint8)
        sequences.append(
            TrainSequence(
                ticket=f"w{walk}",
                tokens=np.array(tokens, np.int32),
                loss_mask=loss_mask,
                logprobs=(-np.log(4) * loss_mask).astype(np.float32),
                allowed=np.where(loss_mask, 0, FULL_VOCABULARY).astype(np.int32),
                advantage=float(rng.normal()),
                temperature=1.0,
            )
        )
    return TrainBatch(sequences=sequences, allowed_sets=[letters])


def cases() -> list[Case]:
    """Smallest first."""
    shares = {50: 512, 75: 768, 90: 922}
    return [
        Case("small_model", "0.6M parameters, 64 walks over FrozenLake", SMALL, walks, rounds_factor=5),
        Case(
            "135m",
            "SmolLM2-135M's shape, 4 groups of 8 x (50 shared + 8 own)",
            SMOL,
            lambda: groups(4, 50, 8, 49152),
            bound=8 * 57 / (50 + 8 * 7),  # the last token predicts nothing
        ),
        *(
            Case(
                str(share),
                f"hidden 512, 8 x 1,024 tokens, {share}% shared",
                MIDDLE,
                lambda prompt=prompt: groups(1, prompt, 1024 - prompt, 512),  # type: ignore[misc]
                bound=8 * 1023 / (prompt + 8 * (1023 - prompt)),
            )
            for share, prompt in shares.items()
        ),
    ]


def measure(case: Case, rounds: int) -> Reading:
    """Both ways in turn, after an unmeasured pass over one sequence."""
    settings, batch = TrainSettings(), case.batch()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(case.config))
        backend = TorchBackend(Path(directory), seed=0, settings=settings, dtype="float32", from_scratch=True)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    memory = {False: 0.0, True: 0.0}
    backend.forward_backward(TrainBatch(batch.sequences[:1], batch.allowed_sets))
    for turn in range(rounds * case.rounds_factor):
        for shared in (False, True) if turn % 2 else (True, False):
            backend.computes_trees = shared
            before = _reset_peak()
            start = time.process_time()
            backend.forward_backward(batch)
            seconds[shared].append(time.process_time() - start)
            memory[shared] = max(memory[shared], _peak_mb() - before)
    whole, shared_s = min(seconds[False]), min(seconds[True])
    return Reading(
        figure=f"prefix_speedup_{case.name}",
        about=case.about,
        speedup=whole / shared_s,
        bound=case.bound,
        whole_s=whole,
        shared_s=shared_s,
        whole_tokens=_computed(batch, settings, trees=False),
        shared_tokens=_computed(batch, settings, trees=True),
        whole_mb=memory[False],
        shared_mb=memory[True],
    )


def _computed(batch: TrainBatch, settings: TrainSettings, *, trees: bool) -> int:
    every = list(range(len(batch.sequences)))
    packer = Packer(batch, np.zeros(len(every)), torch.device("cpu"), trees=trees)
    return sum(micro.tokens.numel() for micro in packer.micro_batches(every, settings.micro_batch_tokens))


def _reset_peak() -> float:
    """Give freed memory back and start the peak anew; returns what is held, in MB."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_mb()


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="of small_model 135m 50 75 90 speed")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = [case for case in cases() if not arguments.only or case.name in arguments.only]
    if arguments.quick and not arguments.only:
        chosen = [case for case in chosen if case.name in ("small_model", "90")]
    readings = []
    for case in chosen:
        readings.append(measure(case, 2 if arguments.quick else arguments.rounds))
        if not arguments.json:
            _print(readings[-1])
    speed = None
    if not arguments.only or "speed" in arguments.only:
        speed = trainer_speed.measure(MIDDLE, 2 if arguments.quick else arguments.rounds)
    if arguments.json:
        figures = {reading.figure: round(reading.speedup, 3) for reading in readings}
        if speed is not None:
            figures |= {name: round(getattr(speed, name), 3) for name in SPEEDS}
        command = " ".join(["python -m benchmarks.trainer", *sys.argv[1:]])
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        cases_ = msgspec.to_builtins([*readings, *([] if speed is None else [speed])])
        print(json.dumps({"figures": figures, "command": command, "machine": machine, "cases": cases_}, indent=2))
    elif speed is not None:
        _print_speed(speed)


def _print(reading: Reading) -> None:
    bound = "" if np.isnan(reading.bound) else f", tokens {reading.bound:.2f}x"
    print(f"{reading.figure}  {reading.speedup:.2f}x{bound}  ({reading.about})")
    rows = (
        ("whole", reading.whole_s, reading.whole_tokens, reading.whole_mb),
        ("shared", reading.shared_s, reading.shared_tokens, reading.shared_mb),
    )
    for name, seconds, tokens, memory in rows:
        print(f"    {name:<7} {seconds * 1000:9.1f} ms  {tokens:6d} tokens computed  {memory:7.0f} MB", flush=True)


def _print_speed(speed: trainer_speed.Reading) -> None:
    print(f"a step on {speed.tokens} tokens of segments that share nothing, hidden {MIDDLE['hidden_size']}")
    for name in ("bare", "torch", "megatron"):
        seconds = getattr(speed, f"{name}_s")
        print(f"    {name:<9} {seconds * 1000:9.1f} ms  {speed.tokens / seconds:9.0f} tokens/s of CPU time")
    for figure, target in SPEEDS.items():
        print(f"{figure}  {getattr(speed, figure):.3f}  (>= {target})")


if __name__ == "__main__":
    main()
