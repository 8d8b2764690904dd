"""Tiny random models and requests for the engine tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from asyncrl.engines.base import GenerateRequest
from asyncrl.types import Completion, SamplingParams

VOCABULARY = 97
# A large initializer_range makes distributions peaked and seeds very different, so that updates and mistakes show.
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
}


def make_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).eval()


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + 1000 * length).integers(3, VOCABULARY, length).astype(np.int32)


def request(
    prompt_ids: np.ndarray,
    n: int = 1,
    *,
    new: int = 12,
    temperature: float = 1.0,
    stop: tuple[int, ...] = (),
    seed: int = 0,
    name: str = "r",
) -> GenerateRequest:
    sampling = SamplingParams(temperature=temperature, max_new_tokens=new, stop_token_ids=stop)
    return GenerateRequest(request_id=name, prompt_ids=prompt_ids, n=n, sampling=sampling, seed=seed)


def write_own_sampling(folder: Path) -> None:
    """Write sampling defaults as checkpoints of chat models have them. transformers' generate() and vLLM's server would
    apply them."""
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3}
    (folder / "generation_config.json").write_text(json.dumps(settings))


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def plain_logprobs(
    model: torch.nn.Module, prompt_ids: np.ndarray, completion: Completion, temperature: float = 1.0
) -> np.ndarray:
    """Return the [N] log-probs of the completion by one plain forward over prompt and completion, without cache or
    batch."""
    ids = torch.from_numpy(np.concatenate([prompt_ids, completion.token_ids]).astype(np.int64))[None]
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, -1)
    start = len(prompt_ids) - 1
    rows = torch.arange(start, start + len(completion.token_ids))
    return logprobs[rows, ids[0, start + 1 :]].numpy()
