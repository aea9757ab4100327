"""Secrets are taken out by value, by name and by shape; figures and words stay."""

from __future__ import annotations

import pytest

from coordinator.bundle.redaction import LEFT_OUT, Redactor, is_secret_name, secrets_of, shown_environment


@pytest.mark.parametrize(
    "text",
    [
        "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
        "api_key: s3cretvalue",
        "'password': 'hunter2!!'",
        '{"secret":"Zx81!!##","public":"p"}',
        "auth_token = abcdefgh",
        "HF_TOKEN: hf_abcdefghijklmnopqrstuvwx",
        "logged in with hf_abcdefghijklmnopqrstuvwx today",
        "Authorization: Bearer abcdefgh.ijklmnop",
        "git clone https://ada:pa55word@example.org/x.git",
        "key AKIAABCDEFGHIJKLMNOP used",
        "-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----",
        "token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4",
        "sk-abcdefghijklmnopqrstuvwx",
    ],
)
def test_a_secret_is_taken_out(text: str) -> None:
    clean, count = Redactor().clean(text)
    assert count >= 1
    assert LEFT_OUT in clean
    for part in ("0123456789abcdef", "s3cret", "hunter2", "Zx81", "abcdefgh", "pa55", "AKIA", "MIIE", "SflK"):
        assert part not in clean


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens_per_turn: 1",
        "tokens_per_s: 1234.5, sampled_tokens: 99999999",
        "tokenizer: bytes",
        "learning_rate: 0.0005",
        '{"event":"lost","tickets":["t8"],"reason":"env_failed"}',
        "tcp://127.0.0.1:4711",
        "token: null",
        "password: ''",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor().clean(text) == (text, 0)


def test_a_known_value_is_taken_out_wherever_it_stands() -> None:
    redactor = Redactor(["correct horse battery", "short"])
    assert redactor.clean("they said: correct horse battery staple") == (f"they said: {LEFT_OUT} staple", 1)
    assert redactor.clean("a short word") == ("a short word", 0)


def test_what_a_configuration_calls_a_secret_is_taken_out_wherever_it_stands() -> None:
    redactor = Redactor()
    redactor.learn("trackers:\n  api_key: 'abc123xyz'\n  max_tokens: 123456\n")
    assert redactor.clean("sent abc123xyz with 123456") == (f"sent {LEFT_OUT} with 123456", 1)


def test_only_harmless_variables_of_the_environment_keep_their_values() -> None:
    environment = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": "hf_abc",
        "MY_DATABASE": "postgres://ada:pa55@db/x",
        "VLLM_API_KEY": "k",
    }
    assert shown_environment(environment) == {
        "HF_TOKEN": LEFT_OUT,
        "MY_DATABASE": LEFT_OUT,
        "OMP_NUM_THREADS": "1",
        "PATH": "/bin",
        "VLLM_API_KEY": LEFT_OUT,
    }
    assert secrets_of(environment) == ["hf_abc", "k"]
    assert not is_secret_name("max_tokens")
