"""A checkpoint comes back bit for bit, or is refused by the name of the file that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.formats import Format
from actors.settings import TrainSettings
from actors.trainer.backends import make_backend
from actors.trainer.backends.protocol import Backend, CheckpointError
from actors.trainer.checkpointing import Layout, load_rank, save_rank
from tests.trainer.samples import batch, policy

LAYOUT = Layout(backend="torch", rank=0, world_size=1)
FILES = ["rank-00000.safetensors", "rank-00000.json", "rank-00000.index.json"]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(5, 3, generator=generator), "step": torch.tensor(7.0)}


def make(policy_dir: Path, seed: int, dtype: str = "float32") -> Backend:
    settings = TrainSettings(weight_decay=0.1)
    return make_backend(policy_dir, seed=seed, settings=settings, dtype=dtype, from_scratch=True)


def test_tensors_and_the_random_state_come_back_bit_for_bit(tmp_path: Path) -> None:
    save_rank(tmp_path, LAYOUT, tensors())
    expected = torch.rand(4)
    torch.rand(100)
    loaded = load_rank(tmp_path, LAYOUT, tensors())
    assert torch.equal(torch.rand(4), expected)
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty"])
def test_a_damaged_file_is_named(tmp_path: Path, file: str, damage: str) -> None:
    save_rank(tmp_path, LAYOUT, tensors())
    path = tmp_path / file
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        data[len(data) // 2] ^= 0x01
        path.write_bytes(data)
    else:
        path.write_bytes(data[:-1] if damage == "truncated" else b"")
    with pytest.raises(CheckpointError, match=file):
        load_rank(tmp_path, LAYOUT, tensors())


@pytest.mark.parametrize("byte", range(0, 240, 7))
def test_no_flipped_bit_of_the_index_goes_unnoticed(tmp_path: Path, byte: int) -> None:
    save_rank(tmp_path, LAYOUT, tensors())
    path = tmp_path / FILES[2]
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x04
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        load_rank(tmp_path, LAYOUT, tensors())


def test_the_part_of_another_rank_or_backend_is_refused(tmp_path: Path) -> None:
    save_rank(tmp_path, LAYOUT, tensors())
    with pytest.raises(CheckpointError, match=r"rank-00001.index.json.*incomplete"):
        load_rank(tmp_path, Layout(backend="torch", rank=1, world_size=2), tensors())
    for other in (Layout(backend="megatron", rank=0, world_size=1), Layout(backend="torch", rank=0, world_size=2)):
        with pytest.raises(CheckpointError, match=r"rank-00000.json: written by"):
            load_rank(tmp_path, other, tensors())


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    save_rank(tmp_path, LAYOUT, tensors())
    with pytest.raises(CheckpointError, match=r"a has shape \(5, 3\), expected \(5, 4\)"):
        load_rank(tmp_path, LAYOUT, tensors() | {"a": torch.zeros(5, 4)})
    with pytest.raises(CheckpointError, match="b is missing"):
        load_rank(tmp_path, LAYOUT, tensors() | {"b": torch.zeros(1)})


def test_a_part_of_newer_software_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("actors.trainer.checkpointing.RANK_PART", Format("part", 2, oldest=2))
        save_rank(tmp_path, LAYOUT, tensors())
    with pytest.raises(CheckpointError, match=r"rank-00000\.json: a rank's part .* of format 2, of newer software"):
        load_rank(tmp_path, LAYOUT, tensors())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_step_after_a_load_is_that_of_an_unbroken_run(tmp_path: Path, dtype: str) -> None:
    directory = policy(tmp_path / "policy")
    unbroken, resumed = make(directory, 0, dtype), make(directory, 1, dtype)
    for i in range(3):
        unbroken.forward_backward(batch(i))
        unbroken.optim_step(1e-3)
    unbroken.save(tmp_path / "checkpoint")
    resumed.forward_backward(batch(5))  # leftovers that a load must clear
    resumed.load(tmp_path / "checkpoint")
    for backend in (unbroken, resumed):
        backend.forward_backward(batch(3))
        backend.optim_step(1e-3)
    theirs = dict(unbroken.export())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in resumed.export())


def test_a_refused_checkpoint_leaves_the_backend_as_it_was(tmp_path: Path) -> None:
    directory = policy(tmp_path / "policy")
    backend = make(directory, 0)
    backend.save(tmp_path / "checkpoint")
    backend.forward_backward(batch(0))
    backend.optim_step(1e-3)
    before = dict(backend.export())
    path = tmp_path / "checkpoint" / FILES[0]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=FILES[0]):
        backend.load(tmp_path / "checkpoint")
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export())
