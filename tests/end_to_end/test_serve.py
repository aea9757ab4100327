"""A policy behind the endpoint, as a command: whoever has the token is answered, and every token is kept."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.trainer.coding import LOGPROB_ERROR
from actors.trainer.dump import read_dump
from tests.end_to_end.yes_or_no import JOB
from tests.support.running import started

SERVE = "coordinator.commands.serve"


def test_what_a_served_policy_says_is_kept_token_by_token(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    words = ["job.yaml", "rollout.max_tokens_per_turn=5", "--out", "kept"]
    with started(SERVE, *words, directory=tmp_path) as command:
        url = command.wait_for(r"base URL\s+(\S+)", timeout_s=120.0)[1]
        token = command.wait_for(r"API key\s+(\S+)\.NAME", timeout_s=5.0)[1]
        told: list[Any] = []
        messages: list[Any] = [{"role": "user", "content": "Well?"}]
        for _ in range(2):
            asked = {"messages": messages, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
            body = json.dumps(asked).encode()
            request = urllib.request.Request(f"{url}/chat/completions", body, {"Authorization": f"Bearer {token}.me"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                told.append(json.load(answer))
            messages += [told[-1]["choices"][0]["message"], {"role": "user", "content": "And?"}]
        command.send(signal.SIGINT)
        assert command.wait(timeout_s=30.0) == 0
        assert "trajectories  1 in 1 groups" in command.stdout
        assert command.leftovers() == []
    (kept,) = read_dump(tmp_path / "kept").trajectories
    (segment,) = kept.segments
    first, second = (turn["choices"][0] for turn in told)
    sampled = segment.loss_mask == 1
    assert segment.tokens[sampled].tolist() == first["token_ids"] + second["token_ids"]
    logprobs = [each["logprob"] for turn in (first, second) for each in turn["logprobs"]["content"]]
    assert segment.logprobs[sampled].tolist() == pytest.approx(logprobs, abs=LOGPROB_ERROR, rel=0)
    for each in (*first["logprobs"]["content"], *second["logprobs"]["content"]):
        best, next_best = (alternative["logprob"] for alternative in each["top_logprobs"])
        assert 0 > best >= max(next_best, each["logprob"])
    assert segment.tokens[: -len(second["token_ids"])].tolist() == told[1]["prompt_token_ids"]
    assert np.all(segment.versions[sampled] == 0)
