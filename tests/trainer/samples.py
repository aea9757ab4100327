"""Small policies and batches for the trainer's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.policy import Qwen3Shape
from actors.trainer.backends.protocol import TrainBatch, TrainSequence
from actors.trajectory import FULL_VOCABULARY

VOCABULARY = 90  # no multiple of what Megatron pads to
SETS = [np.array([3, 5, 8, 13], dtype=np.int32), np.array([0, 1, 89], dtype=np.int32)]


def policy(directory: Path, kind: str = "qwen3", *, tied: bool = True, layers: int = 2) -> Path:
    """Write the config.json of a small policy of the given architecture."""
    shape = Qwen3Shape(
        vocab_size=VOCABULARY,
        hidden_size=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_positions=256,
        tied_embeddings=tied,
    )
    config: dict[str, Any] = shape.hugging_face_config()
    config |= {"pad_token_id": 7, "eos_token_id": 9}  # token 7 is also read: its gradient must not be dropped
    if kind != "qwen3":
        config |= {"model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"]}
        config.pop("attention_bias")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def sequence(rng: np.random.Generator, ticket: str, length: int, **changes: Any) -> TrainSequence:
    """A segment with about a third of its tokens sampled, under either set or the whole vocabulary."""
    tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
    loss_mask = (rng.random(length) < 0.35).astype(np.uint8)
    loss_mask[0], loss_mask[length // 2] = 0, 1
    allowed = np.full(length, FULL_VOCABULARY, dtype=np.int32)
    for place in np.flatnonzero(loss_mask):
        allowed[place] = rng.integers(FULL_VOCABULARY, len(SETS))
        if allowed[place] != FULL_VOCABULARY:
            tokens[place] = rng.choice(SETS[allowed[place]])
    # Rollout probabilities around those of a fresh policy, a few of them far off (the truncation's business).
    sizes = np.array([len(s) for s in SETS] + [VOCABULARY])
    logprobs = np.where(loss_mask, -np.log(sizes[allowed]) + rng.normal(0, 0.6, length), 0).astype(np.float32)
    values: dict[str, Any] = {
        "ticket": ticket,
        "tokens": tokens,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "allowed": allowed,
        "advantage": float(rng.normal()),
        "temperature": float(rng.choice([0.7, 1.0, 1.3])),
    }
    return TrainSequence(**(values | changes))


def batch(seed: int, segments: int = 9, **changes: Any) -> TrainBatch:
    """Ragged segments; the last two are of one trajectory, one has no advantage."""
    rng = np.random.default_rng(seed)
    tickets = [f"t{i}" for i in range(segments - 1)] + [f"t{segments - 2}"]
    sequences = [sequence(rng, ticket, int(rng.integers(4, 40)), **changes) for ticket in tickets]
    if "advantage" not in changes:
        without = sequence(rng, "t-flat", 20, advantage=0.0)
        sequences.insert(3, without)
    return TrainBatch(sequences=sequences, allowed_sets=SETS)


def tree_batch(seed: int, segments: int = 14, **changes: Any) -> TrainBatch:
    """Segments that begin with a part of an earlier one, sampled tokens included, with losses of their own.

    Among them are equal ones, one that is a prefix of another, and one whose only predicted token is its second.
    """
    rng = np.random.default_rng(seed)
    sequences = [sequence(rng, "t0", 40)]
    for i in range(1, segments):
        origin = sequences[rng.integers(max(0, i - 6), i)]
        kept = int(rng.integers(len(origin.tokens) // 2, len(origin.tokens) + 1))
        tail = sequence(rng, f"t{i}", int(rng.integers(2, 9)))
        joined = {
            name: np.concatenate([getattr(origin, name)[:kept], getattr(tail, name)])
            for name in ("tokens", "loss_mask", "logprobs", "allowed")
        }
        joined["logprobs"] = np.where(joined["loss_mask"], joined["logprobs"] + rng.normal(0, 0.1), 0)
        joined["logprobs"] = joined["logprobs"].astype(np.float32)
        sequences.append(msgspec.structs.replace(tail, **joined))
    short = sequence(rng, "t-short", 2)
    twin = msgspec.structs.replace(sequences[2], ticket="t-twin", advantage=-1.5)
    prompt_only = np.concatenate([np.zeros(20, np.uint8), sequences[1].loss_mask[20:]])
    masked = msgspec.structs.replace(sequences[1], ticket="t-masked", loss_mask=prompt_only, advantage=0.5)
    sequences += [short, twin, masked]
    return TrainBatch([msgspec.structs.replace(each, **changes) for each in sequences], SETS)
