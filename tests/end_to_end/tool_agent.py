"""An agent as people have it: the ``openai`` client in a loop that runs the tools which the model calls.

It knows nothing of training; what it got is written down, to be compared with what was sampled and trained on.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import openai

from actors.env.agents.protocol import Result, Session

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("a", "b")
]
SAMPLED_FROM = [ord("a"), ord("b"), ord("\n"), ord("?"), 257]
"""Token ids of the byte tokenizer (257 ends a turn), so that a policy of random weights often calls a tool."""


def run(session: Session, turns: int = 3, journal: str = "", letters_only: bool = True) -> Result:
    """``turns`` of the model's; every third task forgets its first exchange before the last of them."""
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    messages: list[Any] = [{"role": "user", "content": f"task {session.task % 7}?"}]
    restricted = {"allowed_token_ids": SAMPLED_FROM} if letters_only else {}
    calls, told = 0, list[dict[str, Any]]()
    for turn in range(turns):
        edits = session.task % 3 == 0 and turn == turns - 1
        if edits:
            messages = [*messages[:1], *messages[3:]] if len(messages) > 3 else messages[:1]
        reply = client.chat.completions.create(
            model=session.model,
            messages=messages,
            tools=TOOLS,
            logprobs=True,
            extra_body={"return_token_ids": True, **restricted},
        )
        choice = reply.choices[0]
        told.append(
            {
                "id": reply.id,
                "prompt": reply.model_extra["prompt_token_ids"] if reply.model_extra else None,
                "tokens": choice.model_extra["token_ids"] if choice.model_extra else None,
                "logprobs": [each.logprob for each in (choice.logprobs and choice.logprobs.content) or []],
                "edits": edits,
            }
        )
        messages.append(choice.message)
        if choice.message.tool_calls:
            for call in choice.message.tool_calls:
                calls += call.function.name == "a"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name} is open"})
        else:
            messages.append({"role": "user", "content": "call one"})
    if journal:
        with (Path(journal) / f"agent-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({"task": session.task, "told": told}) + "\n")
    return Result(float(calls), metrics={"calls": float(calls)})
