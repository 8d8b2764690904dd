"""A tiny model, for benchmarks of everything but the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.quickstart.modes import write_modes


def tiny_model(**changes: Any) -> PreTrainedModel:
    """Return a model of 149 k parameters: hidden 64, 2 layers, 2 heads of 32, vocabulary 264, except for `changes`."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=264,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **(sizes | changes),
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tiny_task(folder: Path, **changes: Any) -> list[str]:
    """Write a tiny model (see `tiny_model`) with the byte tokenizer, and rows like the quickstart's, to `folder`.
    Returns the settings that name them."""
    tiny_model(**changes).save_pretrained(folder / "model")  # pyright: ignore[reportCallIssue]
    save_byte_tokenizer(folder / "model")
    train, _ = write_modes(folder, seed=0, train_rows=512, eval_rows=8)
    return [f"model.path={folder / 'model'}", f"data.path={train}"]
