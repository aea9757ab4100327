"""What stands beside the weights in a model directory: the configuration and the tokenizer of the policy it came from.

Invariant: ``config.json`` is written last, so that a directory that holds it (which is what makes it one for
``policy.path``) is complete; the dtype that it names is that of the weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from actors.policy import Policy

CONFIG_FILE = "config.json"
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def finish_model(directory: Path, policy_directory: Path, policy: Policy) -> None:
    """Put a policy's configuration and tokenizer beside the weights in ``directory``. Raises ``OSError``."""
    source = policy_directory
    if policy.tokenizer is not None and policy.tokenizer != "bytes":
        source = Path(policy.tokenizer)
    if policy.tokenizer != "bytes":
        for name in COMPANIONS:
            origin = (policy_directory if name == "generation_config.json" else source) / name
            if origin.is_file():
                shutil.copyfile(origin, directory / name)
    config = json.loads((policy_directory / CONFIG_FILE).read_text())
    config.pop("torch_dtype", None)  # the older name of "dtype"
    config["dtype"] = policy.dtype
    partial = directory / f".{CONFIG_FILE}.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n")
    partial.replace(directory / CONFIG_FILE)


def settings_for(directory: Path, policy: Policy) -> list[str]:
    """How a job names such a directory."""
    byte_level = (policy.tokenizer or policy.path or "bytes") == "bytes"
    return [f"policy.path={directory}", *(["policy.tokenizer=bytes"] if byte_level else [])]
