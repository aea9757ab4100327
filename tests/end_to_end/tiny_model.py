"""A Hugging Face model directory as a user has one: random weights, a byte-level BPE tokenizer, a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


Architecture = Literal["qwen3", "qwen2", "llama"]


def make_model(
    directory: Path, architecture: Architecture = "qwen3", *, tied: bool = True, shard_size: str = "1GB"
) -> Path:
    """Write the directory and return it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["Guess a number from 1 to 9.", "Higher. Lower. Right!"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # hidden size / heads, where an architecture has no such setting (qwen2)
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory, max_shard_size=shard_size)
    return directory
