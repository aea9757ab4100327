"""Prompts computed by one engine and decoded by another, in processes of their own, through vLLM's KV connectors: token
for token what one engine does with the whole request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.engines.kv_engine import LENGTHS, TOKENS
from tests.engines.reference import Reference, prompt, write_tiny_policy

pytestmark = pytest.mark.deep  # a process loads vLLM for half a minute

BLOCK = 32
WHOLE_BLOCKS = sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy's directory and one for prompts."""
    return write_tiny_policy(tmp_path_factory.mktemp("policy"), tied=True), tmp_path_factory.mktemp("prompts")


def engine(place: tuple[Path, Path], role: str | None, *versions: int) -> dict[str, Any]:
    asked = json.dumps({"policy": str(place[0]), "store": str(place[1]), "role": role, "versions": versions})
    command = [sys.executable, "-m", "tests.engines.kv_engine", asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_a_request_that_is_split_is_token_for_token_the_whole_one(place: tuple[Path, Path]) -> None:
    """Versions 0 and 1 were prefilled, 2 was not: then the decode engine computes all by itself."""
    whole = engine(place, None, 0, 1, 2)
    prefill = engine(place, "prefill", 0, 1)
    decode = engine(place, "decode", 0, 1, 2)
    for version in ("0", "1", "2"):
        assert decode[version]["tokens"] == whole[version]["tokens"]
        for id_, logprobs in whole[version]["logprobs"].items():
            np.testing.assert_allclose(decode[version]["logprobs"][id_], logprobs, rtol=0, atol=1e-5)
        assert {len(tokens) for tokens in decode[version]["tokens"].values()} == {TOKENS}
    assert [whole[version]["prefilled"] for version in "012"] == [sum(LENGTHS)] * 3
    assert [prefill[version]["prefilled"] for version in "01"] == [sum(LENGTHS)] * 2
    assert decode["0"]["prefilled"] == decode["1"]["prefilled"] == sum(LENGTHS) - WHOLE_BLOCKS
    assert decode["2"]["prefilled"] == sum(LENGTHS)
    assert not list(place[1].glob("*/*.*")), "nothing is left half-written"
    reference = Reference(place[0])
    for number in (0, 1, 2):  # the canary is computed whole, whatever is stored
        expected = reference.score(number, prompt(90, 1))
        np.testing.assert_allclose(decode[str(number)]["scores"], expected, rtol=0, atol=1e-4)
