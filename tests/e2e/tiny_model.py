"""A tiny random Llama with a byte-level tokenizer: real architecture, real files, loads at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hiradix.apps.bench.workload import long_text
from tests.seeded_model import seeded_model

VOCAB_SIZE = 512
CONTEXT_LENGTH = 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.2,  # wide enough that the most likely token is never nearly a tie
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_tiny_model(folder: Path) -> Path:
    """A transformers checkpoint of about half a million parameters in `folder`."""
    return _write(folder, "Llama", num_hidden_layers=2)


def write_window_model(folder: Path) -> Path:
    """The same with four layers of Gemma 3, every other one with a window of 64 tokens."""
    layer_types = ["sliding_attention", "full_attention"] * 2
    return _write(
        folder, "Gemma3", num_hidden_layers=4, layer_types=layer_types, sliding_window=64,
        query_pre_attn_scalar=32,
    )  # fmt: skip


def _write(folder: Path, kind: str, **fields: Any) -> Path:
    write_tiny_tokenizer(folder)
    seeded_model(kind, 0, **SIZES, **fields).save_pretrained(folder)
    return folder


def write_tiny_tokenizer(folder: Path) -> None:
    """Its tokenizer's files alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([long_text(50_000)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1], pad_token=special[2]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
