"""The policy as a transformers model, from a directory with ``config.json`` and, unless from scratch, safetensors.

Invariant: a model returned from here holds exactly the weights that were asked for: every parameter came from the
seed or from a safetensors file, none was left as it was initialised because a file or a name was missing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from actors.policy import PolicyError
from actors.weight_files import INDEX, weight_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_RESCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")


def load_config(policy_dir: Path) -> PretrainedConfig:
    """Read ``config.json``. Raises ``PolicyError``."""
    path = policy_dir / "config.json"
    if not path.is_file():
        raise PolicyError(f"{path}: no such file; a policy directory holds config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(policy_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise PolicyError(f"{path}: not a model configuration: {' '.join(str(error).split())}") from None
    return config


def build_model(policy_dir: Path, *, seed: int, dtype: str, from_scratch: bool) -> nn.Module:
    """The causal language model of ``policy_dir`` on the CPU, in ``dtype``, with sdpa attention.

    ``from_scratch``: random weights that depend on the seed and the configuration only. Otherwise those of
    ``model.safetensors`` or of the shards that ``model.safetensors.index.json`` names. Raises ``PolicyError``.
    """
    config = load_config(policy_dir)
    _refuse_rescaled_logits(config, policy_dir)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            # Always drawn in float32, so that bfloat16 rounds the very same weights.
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        except ValueError as error:
            raise PolicyError(f"{policy_dir / 'config.json'}: {' '.join(str(error).split())}") from None
    if not from_scratch:
        _load_weights(model, policy_dir)
    for parameter in model.parameters():  # not the buffers: rotary frequencies stay in float32
        parameter.data = parameter.data.to(DTYPES[dtype])
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        # torch drops the gradient of the padding row, also where that token was really read; Megatron does not.
        embedding.padding_idx = None
    result: nn.Module = model
    return result


def hf_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under their Hugging Face names; a tied tensor appears once, under the name
    of its first use (so a tied ``lm_head.weight`` is left out)."""
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor
    return state


def _refuse_rescaled_logits(config: PretrainedConfig, policy_dir: Path) -> None:
    for key in _RESCALED_LOGITS:
        if getattr(config, key, None) not in (None, 1.0):
            raise PolicyError(
                f"{policy_dir / 'config.json'}: {key} is set; the trainer supports models whose logits are the "
                "output of a linear head"
            )


def _load_weights(model: nn.Module, policy_dir: Path) -> None:
    wanted = hf_state(model)
    left = set(wanted)
    for path, names in weight_files(policy_dir).items():
        left -= _load_file(path, names, wanted)
    if left:
        raise PolicyError(f"{policy_dir}: {len(left)} weights of the model are in no file, first {min(left)}")


def _load_file(path: Path, expected: set[str] | None, wanted: dict[str, torch.Tensor]) -> set[str]:
    """Copy the tensors of one file into the model; returns the names that were wanted and found."""
    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            if expected is not None and expected - held:
                raise PolicyError(f"{path}: {min(expected - held)} is not in it, but {INDEX} says so")
            found = held & wanted.keys()
            for name in sorted(found):
                _copy(path, name, file.get_tensor(name), wanted[name])
    except (SafetensorError, OSError) as error:
        raise PolicyError(f"{path}: not a complete safetensors file ({error}); write or download it again") from None
    return found


def _copy(path: Path, name: str, source: torch.Tensor, target: torch.Tensor) -> None:
    if source.shape != target.shape:
        raise PolicyError(f"{path}: {name} has shape {tuple(source.shape)}, config.json asks for {tuple(target.shape)}")
    with torch.no_grad():
        target.copy_(source)
