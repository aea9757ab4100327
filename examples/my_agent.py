"""An agent of your own: copy this file and my_agent.yaml, and change both.

It is written as for any OpenAI-compatible server, and knows of training only what it returns. Its puzzle: one of three
boxes holds a prize, a note says which, and only one box may be opened. Each is a tool, and so is the note.
"""

from typing import Any

import openai

from actors.env.agents.protocol import Result, Session

BOXES = "abc"
NOTE = "n"
RULES = (
    "One of the boxes a, b and c holds a prize, and you may open one. Answer with a line that is the letter of the "
    "box, or n to read a note first that says which it is."
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in (*BOXES, NOTE)
]
CLIENT = openai.OpenAI(base_url="http://unused", api_key="unused")
"""Its connections serve all sessions of a process: a client for each would cost more than the requests."""


def find(session: Session, letters_only: bool = False) -> Result:
    """Open a box. ``letters_only``: of a policy over bytes that starts from random weights only letters are sampled."""
    client = CLIENT.with_options(base_url=session.base_url, api_key=session.api_key)
    extra = {"allowed_token_ids": [ord(letter) for letter in (*BOXES, NOTE)]} if letters_only else {}
    prize = BOXES[session.task % len(BOXES)]
    messages: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": "Which?"}]
    notes = 0
    while True:
        reply = client.chat.completions.create(model=session.model, messages=messages, tools=TOOLS, extra_body=extra)
        message = reply.choices[0].message
        if not message.tool_calls:
            return Result(0.0, metrics={"notes": float(notes)})
        call = message.tool_calls[0]
        if call.function.name in BOXES:
            found = call.function.name == prize
            return Result(float(found), success=found, metrics={"notes": float(notes)})
        notes += 1
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": f"box {prize}"}]
