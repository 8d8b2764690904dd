"""A model small enough for benchmarks that are about everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from asyncrl.data.byte_tokenizer import save_byte_tokenizer
from asyncrl.data.modes import write_modes


def tiny_model(**changes: Any) -> PreTrainedModel:
    """149 k parameters: hidden 64, 2 layers, 2 heads of 32, vocabulary 264; but for `changes`."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=264,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **(sizes | changes),
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tiny_task(folder: Path) -> list[str]:
    """Settings that name such a model, with the byte tokenizer, and the quickstart's kind of rows, all in `folder`."""
    tiny_model().save_pretrained(folder / "model")  # pyright: ignore[reportCallIssue]
    save_byte_tokenizer(folder / "model")
    train, _ = write_modes(folder, seed=0, train_rows=512, eval_rows=8)
    return [f"model.path={folder / 'model'}", f"data.path={train}"]
