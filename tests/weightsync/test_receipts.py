"""Receipts: every way in which ``verify`` refuses, and the faults of real engines that it must catch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from actors.proxy.engines import EngineKind, make_engine
from actors.proxy.engines.protocol import Engine
from actors.proxy.engines.torch_weights import tensor_digest
from actors.weightsync.manifest import Manifest, Receipt, ReceiptRefused, TensorFact, digest, verify
from tests.engines.reference import MAX_MODEL_LEN, MAX_SEQUENCES, Reference, prompt, write_tiny_policy

CANARY = prompt(40, 123)

# Pure data: one manifest of two tensors, and receipts that differ from the right one in one thing each.

FACTS = {
    "a": TensorFact("float32", (2,), digest(np.array([1.0, 2.0], dtype="<f4").tobytes())),
    "b": TensorFact("float32", (1,), digest(np.array([3.0], dtype="<f4").tobytes())),
}
MANIFEST = Manifest(
    version=7,
    dtype="float32",
    tensors=FACTS,
    canary=np.array([1, 2, 3], dtype=np.int32),
    canary_logprobs=np.array([-1.0, -2.0], dtype=np.float32),
)
RECEIPT = Receipt(
    version=7,
    engine="engine-3",
    digests={name: fact.digest for name, fact in FACTS.items()},
    canary_logprobs=np.array([-1.0, -2.0], dtype=np.float32),
)


def test_the_digest_is_sha256() -> None:
    # FIPS 180-4's example for the three bytes "abc".
    assert digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_true_receipt_is_accepted() -> None:
    verify(MANIFEST, RECEIPT)


def test_a_canary_within_the_tolerance_is_accepted() -> None:
    verify(MANIFEST, msgspec.structs.replace(RECEIPT, canary_logprobs=np.array([-1.0005, -2.0], dtype=np.float32)))


def test_bfloat16_has_its_own_tolerance() -> None:
    off = msgspec.structs.replace(RECEIPT, canary_logprobs=np.array([-1.3, -2.0], dtype=np.float32))
    verify(msgspec.structs.replace(MANIFEST, dtype="bfloat16"), off)
    with pytest.raises(ReceiptRefused, match=r"off by 0\.3 nats"):
        verify(MANIFEST, off)


REFUSED = {
    "another version": (
        {"version": 6},
        "engine engine-3, version 7: the receipt is for version 6",
    ),
    "a tensor missing": (
        {"digests": {"a": FACTS["a"].digest}},
        "1 tensors were not loaded, first b",
    ),
    "a tensor too many": (
        {"digests": RECEIPT.digests | {"c": FACTS["a"].digest}},
        "1 tensors are not in the manifest, first c",
    ),
    "a tensor that differs": (
        {"digests": RECEIPT.digests | {"b": FACTS["a"].digest}},
        "1 tensors differ from what was published, first b",
    ),
    "a canary of another length": (
        {"canary_logprobs": np.array([-1.0], dtype=np.float32)},
        r"the canary has \(1,\) log-probabilities, expected \(2,\)",
    ),
    "a canary that is off": (
        {"canary_logprobs": np.array([-1.0, -2.1], dtype=np.float32)},
        "off by 0.1 nats",
    ),
    "a canary that is no number": (
        {"canary_logprobs": np.array([-1.0, np.nan], dtype=np.float32)},
        "off by nan nats",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_receipt_that_differs_is_refused_by_what_differs(change: dict[str, object], message: str) -> None:
    with pytest.raises(ReceiptRefused, match=message):
        verify(MANIFEST, msgspec.structs.replace(RECEIPT, **change))


# Real engines.


class Rig:
    """An engine that serves version 0, and the trainer's side of every version."""

    def __init__(self, kind: EngineKind, directory: Path) -> None:
        policy_dir = write_tiny_policy(directory, tied=True)
        self.reference = Reference(policy_dir, versions=(0, 1))
        self.engine: Engine = make_engine(kind, policy_dir, max_sequences=MAX_SEQUENCES, max_model_len=MAX_MODEL_LEN)

    def manifest(self, version: int) -> Manifest:
        facts = {
            name: TensorFact("float32", tuple(tensor.shape), digest(tensor.numpy().astype("<f4").tobytes()))
            for name, tensor in self.reference.weights(version)
        }
        return Manifest(version, "float32", facts, CANARY, self.reference.score(version, CANARY))

    def receipt(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Receipt:
        """What the engine proves after it was given these tensors as that version."""
        digests = self.engine.load_weights(version, tensors)
        return Receipt(version, "engine-0", digests, self.engine.score(CANARY))


@pytest.fixture(scope="module", params=["torch", "vllm"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    rig = Rig(request.param, tmp_path_factory.mktemp("policy"))
    yield rig
    rig.engine.close()


@pytest.fixture
def rig(started: Rig) -> Rig:
    verify(started.manifest(0), started.receipt(0, started.reference.weights(0)))
    return started


def test_an_engine_that_loaded_the_version_is_accepted(rig: Rig) -> None:
    verify(rig.manifest(1), rig.receipt(1, rig.reference.weights(1)))


def test_the_old_version_served_as_the_new_one_is_refused(rig: Rig) -> None:
    with pytest.raises(ReceiptRefused, match="tensors differ from what was published"):
        verify(rig.manifest(1), rig.receipt(1, rig.reference.weights(0)))


def test_a_receipt_for_the_old_version_is_refused(rig: Rig) -> None:
    with pytest.raises(ReceiptRefused, match="the receipt is for version 0"):
        verify(rig.manifest(1), rig.receipt(0, rig.reference.weights(0)))


def test_tensors_taken_but_not_put_to_use_are_refused_by_the_canary(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    swallow_the_tensors(rig, monkeypatch)
    with pytest.raises(ReceiptRefused, match="does not compute with what it was given"):
        verify(rig.manifest(1), rig.receipt(1, rig.reference.weights(1)))


def swallow_the_tensors(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on with the old version, though every tensor passes through its loader."""
    if type(rig.engine).__name__ == "VllmEngine":
        worker = "actors.proxy.engines.vllm_worker.WeightTaker.take_weights"
        monkeypatch.setattr(worker, lambda self, tensors: {name: tensor_digest(each) for name, each in tensors})
    else:
        parameters = rig.engine._parameters  # type: ignore[attr-defined]
        copies = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        monkeypatch.setattr(rig.engine, "_parameters", copies)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_one_skipped_tensor_is_refused_and_a_full_resend_accepted(rig: Rig, name: str) -> None:
    weights = [(other, tensor) for other, tensor in rig.reference.weights(1) if other != name]
    with pytest.raises(ReceiptRefused, match=f"1 tensors were not loaded, first {name}"):
        verify(rig.manifest(1), rig.receipt(1, weights))
    verify(rig.manifest(1), rig.receipt(1, rig.reference.weights(1)))


def test_one_flipped_bit_is_refused(rig: Rig) -> None:
    weights = rig.reference.weights(1)
    weights[5][1].view(torch.int32).view(-1)[0] ^= 1
    with pytest.raises(ReceiptRefused, match=f"1 tensors differ from what was published, first {weights[5][0]}"):
        verify(rig.manifest(1), rig.receipt(1, weights))


def test_a_stale_tied_head_is_refused_by_the_canary_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """For vLLM the real fault: its reload leaves a tied head's prepared kernel as it was."""
    forget_the_head(rig, monkeypatch)
    receipt = rig.receipt(1, rig.reference.weights(1))
    assert receipt.digests == {name: fact.digest for name, fact in rig.manifest(1).tensors.items()}
    with pytest.raises(ReceiptRefused, match="every tensor arrived, but the canary's log-probabilities are off"):
        verify(rig.manifest(1), receipt)
    monkeypatch.undo()
    verify(rig.manifest(1), rig.receipt(1, rig.reference.weights(1)))


def forget_the_head(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    if type(rig.engine).__name__ == "VllmEngine":
        monkeypatch.setattr("actors.proxy.engines.vllm_worker.refresh_head", lambda model: None)
    else:
        decoder = rig.engine._run  # type: ignore[attr-defined]
        monkeypatch.setattr(decoder, "_head", decoder._head.detach().clone())
