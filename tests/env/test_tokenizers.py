"""Tokenizers and chat templates, against transformers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from actors.env.chat_template import TemplateRefusal
from actors.env.tokenizers import ByteTokenizer, HuggingFaceTokenizer, TokenizerError, load_tokenizer
from actors.policy import Policy, Qwen3Shape

# Written after the templates that models ship: loops with a break, namespaces, macros, tojson, generation blocks.
TEMPLATES = {
    "chatml": None,
    "generation block": (
        "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n{% generation %}\n{{ m.content }}{{ eos_token }}\n"
        "{% endgeneration %}\n  {% else %}\n[{{ m.role }}] {{ m.content }}\n  {% endif %}\n{% endfor %}"
    ),
    "namespace, macro and break": (
        "{%- macro head(role) -%}<{{ role | upper }}>{%- endmacro -%}{{ bos_token }}"
        "{%- set ns = namespace(last=-1) -%}{%- for m in messages[::-1] -%}{%- if m.role == 'user' -%}"
        "{%- set ns.last = messages | length - 1 - loop.index0 -%}{%- break -%}{%- endif -%}{%- endfor -%}"
        "{%- for m in messages -%}{{ head(m.role) }}{{ m['content'] | tojson }}{{ '!' if loop.index0 == ns.last }}\n"
        "{%- endfor -%}{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
    ),
    "tools and unset tokens": (
        "{% if tools %}T{% endif %}{{ unk_token is defined }}{{ cls_token }}{{ documents is none }}"
        "{{ messages | map(attribute='content') | join('|') }}"
    ),
}

CONVERSATION = [("system", 'Rules: <b> & "é"'), ("user", " go\n"), ("assistant", "R"), ("user", "0,1>")]


def change(directory: Path, **settings: Any) -> None:
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.update(settings)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_templates_render_as_in_transformers(
    model_directory: Path, name: str, add_generation_prompt: bool
) -> None:
    if TEMPLATES[name] is not None:
        change(model_directory, chat_template=TEMPLATES[name])
    reference: Any = AutoTokenizer.from_pretrained(model_directory)
    ours = HuggingFaceTokenizer(model_directory)
    messages = [{"role": role, "content": content} for role, content in CONVERSATION]
    text = ours.chat_template.render(CONVERSATION, add_generation_prompt=add_generation_prompt)
    options = {"add_generation_prompt": add_generation_prompt}
    assert text == reference.apply_chat_template(messages, tokenize=False, **options)
    expected = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert ours.encode(text).tolist() == expected


def test_encoding_and_decoding_agree_with_transformers(model_directory: Path) -> None:
    reference: Any = AutoTokenizer.from_pretrained(model_directory)
    ours = HuggingFaceTokenizer(model_directory)
    for text in ("left right", "<|im_start|>user\nübër 冰<|im_end|>\n", "", "0,1>"):
        tokens = ours.encode(text)
        assert tokens.dtype == np.int32
        assert tokens.tolist() == reference.encode(text, add_special_tokens=False)
        assert ours.decode(tokens) == reference.decode(tokens.tolist(), skip_special_tokens=True)
    assert ours.vocab_size == len(reference)
    assert ours.eos_ids == (reference.eos_token_id,)


def test_a_template_file_wins_over_the_settings_and_lists_have_a_default(model_directory: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from the list"}]
    change(model_directory, chat_template=named)
    tokenizer = HuggingFaceTokenizer(model_directory)
    assert tokenizer.chat_template.render([], add_generation_prompt=False) == "from the list"
    (model_directory / "chat_template.jinja").write_text("from the file")
    tokenizer = HuggingFaceTokenizer(model_directory)
    assert tokenizer.chat_template.render([], add_generation_prompt=False) == "from the file"


def test_end_tokens_come_from_the_tokenizer_and_the_generation_settings(model_directory: Path) -> None:
    (model_directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert HuggingFaceTokenizer(model_directory).eos_ids == (0, 2)
    change(model_directory, eos_token=None)
    (model_directory / "generation_config.json").unlink()
    (model_directory / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert HuggingFaceTokenizer(model_directory).eos_ids == (1,)


def remove(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("tokenizer.json"), r"tokenizer\.json: expected a fast tokenizer's file, found none"),
        (write("tokenizer.json", "{truncated"), r"tokenizer\.json: not a readable tokenizer"),
        (remove("tokenizer_config.json"), r"tokenizer_config\.json: expected the tokenizer's settings, found no such"),
        (write("tokenizer_config.json", "{"), r"tokenizer_config\.json: not readable as JSON"),
        (write("tokenizer_config.json", "[]"), r"tokenizer_config\.json: expected a JSON object, found list"),
        (write("generation_config.json", "x"), r"generation_config\.json: not readable as JSON"),
        (lambda d: change(d, chat_template=None), r"tokenizer_config\.json: expected a chat_template .* found none"),
        (lambda d: change(d, chat_template="{% if %}"), r"tokenizer_config\.json: chat template, line 1"),
        (write("chat_template.jinja", "\n{{ a b }}"), r"chat_template\.jinja: chat template, line 2"),
        (lambda d: change(d, eos_token="<nope>"), r"tokenizer_config\.json: eos_token '<nope>' is not in tokenizer"),
        (lambda d: change(d, eos_token=None), r"tokenizer_config\.json: expected an eos_token"),
    ],
)
def test_a_damaged_directory_is_one_line_that_names_the_file(
    model_directory: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(model_directory)
    with pytest.raises(TokenizerError, match=message) as caught:
        HuggingFaceTokenizer(model_directory)
    assert str(model_directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_says_what_it_was_given(model_directory: Path) -> None:
    change(model_directory, chat_template="{{ raise_exception('no system role') }}")
    template = HuggingFaceTokenizer(model_directory).chat_template
    with pytest.raises(TemplateRefusal, match=r"refused the roles \[system, user\]: no system role"):
        template.render([("system", "s"), ("user", "u")], add_generation_prompt=True)


def test_a_template_cannot_reach_into_python(model_directory: Path) -> None:
    change(model_directory, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    template = HuggingFaceTokenizer(model_directory).chat_template
    with pytest.raises(TemplateRefusal, match="unsafe"):
        template.render([("user", "u")], add_generation_prompt=True)


def test_bytes_are_their_own_tokens() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("0é>")
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [48, 0xC3, 0xA9, 62]
    assert tokenizer.decode(np.array([256, 48, 0xC3, 0xA9, 62, 257], np.int32)) == "0é>"
    assert tokenizer.decode(np.array([0xC3], np.int32)) == "\ufffd"


def test_the_policy_names_its_tokenizer(model_directory: Path) -> None:
    assert isinstance(load_tokenizer(Policy()), ByteTokenizer)
    assert isinstance(load_tokenizer(Policy(path=str(model_directory))), HuggingFaceTokenizer)
    assert isinstance(load_tokenizer(Policy(tokenizer=str(model_directory))), HuggingFaceTokenizer)
    assert isinstance(load_tokenizer(Policy(path=str(model_directory), tokenizer="bytes")), ByteTokenizer)
    with pytest.raises(TokenizerError, match=r"policy\.shape\.vocab_size: .* at least 264, found 256"):
        load_tokenizer(Policy(shape=Qwen3Shape(vocab_size=256)))


def test_no_model_library_is_imported() -> None:
    code = (
        "import sys, actors.env.framing; print([m for m in ('torch', 'transformers', 'gymnasium') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == "[]"
