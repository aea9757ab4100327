"""Keys and values of prompts, handed from engines that prefill to engines that decode: vLLM's KV-connector interface
over a directory that both see.

    prefill engine: computes a prompt, writes its whole blocks     DIRECTORY/WEIGHTS/PROMPT/LAYER.safetensors
    decode engine:  finds them, loads them, computes the rest and decodes

Invariant: a decode engine loads only what was computed by the weights that it has (``WEIGHTS`` is a digest of theirs),
for exactly the tokens that its prompt begins with, and written to the end (a prompt's directory gets its name last).
Whatever is missing it computes itself.

vLLM's own ExampleConnector reads and writes the blocks. It has no weights in its keys, takes what is half-written for a
hit, and counts differently when it looks than when it writes; so what is found, and under which name, is decided here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.utils.hashing import safe_hash

from actors.proxy.engines.protocol import KvRole

ROLES: dict[KvRole, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

KEEP_S = 120.0
"""For so long a prompt's keys and values stay: a request that was prefilled is decoded by then, or prefilled anew."""


def use_weights(digests: Mapping[str, str]) -> None:
    """From now on what is written and looked for is these weights'."""
    together = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    PromptStore.weights = safe_hash(together.encode(), usedforsecurity=False).hexdigest()


def kv_transfer(directory: Path, role: KvRole) -> KVTransferConfig:
    """What vLLM is told."""
    return KVTransferConfig(
        kv_connector=PromptStore.__name__,
        kv_connector_module_path=__name__,
        kv_role=ROLES[role],
        kv_connector_extra_config={"shared_storage_path": str(directory)},
    )


class PromptStore(ExampleConnector):  # type: ignore[misc]  # vLLM has no types here
    """See the module docstring. vLLM makes two, in one process: one decides, one reads and writes."""

    weights = ""  # digest of what the process's engine has

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._writes = self._kv_transfer_config.kv_role == ROLES["prefill"]
        self._unfinished = ""  # behind the name of a directory that is being written

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens to be loaded beyond those that the engine has itself."""
        tokens = list(request.prompt_token_ids or ())
        count = self._whole_blocks(tokens)
        if self._writes or count <= num_computed_tokens or not self._is_complete(tokens[:count]):
            return 0, False
        return count - num_computed_tokens, False

    def _found_match_for_prompt(self, prompt_token_ids: list[int], mm_hashes: list[str]) -> bool:
        """Asked for prompts of which nothing is loaded: whether there is nothing to be written either."""
        count = self._whole_blocks(prompt_token_ids)
        return not self._writes or not count or self._is_complete(prompt_token_ids[:count])

    def save_kv_layer(self, *arguments: Any, **options: Any) -> None:
        self._unfinished = f".{os.getpid()}"
        try:
            super().save_kv_layer(*arguments, **options)
        finally:
            self._unfinished = ""

    def wait_for_save(self) -> None:
        """At the end of a step: what it has written is whole."""
        for written in self._get_connector_metadata().requests:
            if written.is_store:
                folder = self._folder(written.token_ids.tolist())
                unfinished = f"{folder}.{os.getpid()}"
                try:
                    os.rename(unfinished, folder)
                except OSError:  # another engine was quicker, or a request of the same step
                    shutil.rmtree(unfinished, ignore_errors=True)
                _remove_old(Path(self._storage_path))

    def _whole_blocks(self, tokens: list[int]) -> int:
        """Tokens of a prompt that are stored: whole blocks, and at least one token is left to be computed."""
        return int((len(tokens) - 1) // self._block_size * self._block_size) if tokens else 0

    def _is_complete(self, tokens: list[int]) -> bool:
        try:
            os.utime(self._folder(tokens))  # it is needed, and stays
        except FileNotFoundError:
            return False
        return True

    def _folder(self, tokens: Iterable[int]) -> str:
        name = safe_hash(b"".join(int(token).to_bytes(4, "little") for token in tokens), usedforsecurity=False)
        return os.path.join(self._storage_path, self.weights, name.hexdigest())

    def _generate_foldername_debug(self, token_ids: Any, mm_hashes: list[str], create_folder: bool = False) -> str:
        folder = self._folder(token_ids.tolist()) + self._unfinished
        if create_folder:
            os.makedirs(folder, exist_ok=True)
        return folder


def _remove_old(directory: Path) -> None:
    """Prompts that were written long ago, of all weights. Others may do the same at the same time."""
    before = time.time() - KEEP_S
    for weights in directory.iterdir():
        for prompt in weights.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if prompt.stat().st_mtime < before:
                    shutil.rmtree(prompt, ignore_errors=True)
