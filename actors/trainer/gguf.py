"""A Hugging Face model directory from a GGUF file: ``python -m actors.trainer.gguf FILE DIRECTORY``.

Invariant: the directory appears whole or not at all; it holds config.json, model.safetensors (float32, a tied head left
out), the tokenizer and its chat template, and nothing in it says that the weights were ever quantised.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from actors.trainer.model import hf_state


def convert(file: Path, directory: Path) -> None:
    """Dequantise ``file``. Raises ``OSError``, ``ValueError`` or ``ImportError`` (the packages gguf and accelerate
    read such files)."""
    half = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers saves no model that it has read from GGUF: it takes it for a quantised one.
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in hf_state(model).items()},
        half / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads(model.config.to_json_string())
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    (half / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(half)
    shutil.rmtree(directory, ignore_errors=True)
    half.rename(directory)


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"{sys.argv[1]}: {' '.join(str(error).split())}")
