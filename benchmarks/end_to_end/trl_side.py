"""TRL's side in a process of its own: ``python -m benchmarks.end_to_end.trl_side STEPS SEED``.

On standard output a line of JSON once it begins to train, and one a step: seconds since the epoch, mean reward. TRL
gets its fastest simple settings for this machine: float32 without gradient checkpointing (it defaults to bfloat16 with
checkpointing, slower here), one generation batch a step and one optimiser step on it, no reference model (beta 0),
fused AdamW, no data loader workers, no logging, saving or progress bar, and the number of torch threads with which it
was found faster just before.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers.convert_slow_tokenizer import bytes_to_unicode
from trl import GRPOConfig, GRPOTrainer

from actors.policy import write_config
from actors.trainer.model import build_model
from benchmarks.end_to_end import task

THREADS = (1, 2)
TRIAL_TOKENS, TRIALS = 8, 3


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids as in ``actors.env.tokenizers.ByteTokenizer``. The end token's lies beyond the model's vocabulary, so that
    no answer ends early."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary |= {"<pad>": 256} | {f"<unused{index}>": index for index in range(257, task.SHAPE.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


class Reporter(TrainerCallback):  # type: ignore[misc]
    """Prints each step as it ends."""

    def __init__(self) -> None:
        self.reward = 0.0

    def score(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [task.reward(ids) for ids in completion_ids]
        self.reward = sum(rewards) / len(rewards)
        for ids in completion_ids:
            if len(ids) != task.COMPLETION_TOKENS:
                raise RuntimeError(f"an answer has {len(ids)} tokens, expected {task.COMPLETION_TOKENS}")
        return rewards

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        print(json.dumps({"begin": time.time(), "threads": torch.get_num_threads()}), flush=True)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        print(json.dumps({"time": time.time(), "reward": self.reward}), flush=True)


def faster_threads(model: Any) -> int:
    """With how many threads the model generates faster here and now."""
    prompts = torch.zeros((task.GROUPS * task.GROUP_SIZE, len(task.prompt(0))), dtype=torch.int64)
    best = dict.fromkeys(THREADS, float("inf"))
    for trial in range(TRIALS * len(THREADS)):
        threads = THREADS[trial % len(THREADS)]
        torch.set_num_threads(threads)
        start = time.perf_counter()
        model.generate(prompts, max_new_tokens=TRIAL_TOKENS, do_sample=True, pad_token_id=256)
        best[threads] = min(best[threads], time.perf_counter() - start)
    return min(best, key=lambda threads: best[threads])


def configuration(directory: str, steps: int, seed: int) -> GRPOConfig:
    """See the module docstring."""
    return GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=task.GROUPS * task.GROUP_SIZE,
        gradient_accumulation_steps=1,
        num_generations=task.GROUP_SIZE,
        max_completion_length=task.COMPLETION_TOKENS,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # averages over the tokens of the batch, as ours
        learning_rate=task.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=task.ADAM_BETAS[0],
        adam_beta2=task.ADAM_BETAS[1],
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


def main(steps: int, seed: int) -> None:
    reporter = Reporter()

    def letters(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return reporter.score(completion_ids)

    with tempfile.TemporaryDirectory() as directory:
        write_config(task.SHAPE, Path(directory))
        model = build_model(Path(directory), seed=seed, dtype="float32", from_scratch=True)
        model.generation_config.eos_token_id = None  # type: ignore[union-attr]
        torch.set_num_threads(faster_threads(model))
        prompts = [{"prompt": task.prompt(index)} for index in range(steps * task.GROUPS)]
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=letters,
            args=configuration(directory, steps, seed),
            train_dataset=Dataset.from_list(prompts),
            processing_class=byte_tokenizer(),
            callbacks=[reporter],
        )
        trainer.train()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
