"""One engine of a prefill/decode split, as a process: ``python -m tests.engines.kv_engine REQUEST``.

Request and answer are JSON objects. It loads each version in turn, runs its prompts (for a prefill engine: one token)
and says what it sampled and computed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.engines.vllm_engine import VllmEngine
from tests.engines.reference import Reference, finish, prompt

LENGTHS = (33, 65, 70, 83, 96, 97, 121, 20)
"""Of prompts: around whole blocks of 32, and one that has none."""
TOKENS = 24


def requests() -> list[GenerateRequest]:
    """Greedy and sampled ones."""
    return [
        GenerateRequest(f"r{i}", f"t{i}", prompt(length, i), TOKENS, temperature=float(i % 2), seed=i)
        for i, length in enumerate(LENGTHS)
    ]


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """``policy``, ``store``, ``role`` (None: neither reads nor writes), ``versions``."""
    policy_dir = Path(asked["policy"])
    reference = Reference(policy_dir)
    store = None if asked["role"] is None else (Path(asked["store"]), asked["role"])
    engine = VllmEngine(policy_dir, max_sequences=4, max_model_len=200, kv_store=store)
    answers: dict[str, Any] = {}
    for version in asked["versions"]:
        engine.load_weights(version, reference.weights(version))
        engine.work.step(1.0)
        engine.work.take()
        for request in requests():
            whole = asked["role"] != "prefill"
            tokens = request.max_tokens if whole else 1
            engine.add(GenerateRequest(**{**_fields(request), "max_tokens": tokens}))
        done = finish(engine)
        engine.work.step(1.0)
        work = engine.work.take()
        answers[str(version)] = {
            "tokens": {id_: completion.tokens.tolist() for id_, completion in done.items()},
            "logprobs": {id_: completion.logprobs.tolist() for id_, completion in done.items()},
            "prefilled": 0 if work is None else work.prefill_tokens,
        }
        scored = prompt(90, 1)
        answers[str(version)]["scores"] = engine.score(scored).tolist()
    engine.close()
    return answers


def _fields(request: GenerateRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))
