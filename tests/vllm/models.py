"""Tiny random models that vLLM's CPU attention can serve, and the log-probs of a completion by a plain forward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from asyncrl.schema import Config
from asyncrl.types import Completion
from tests.engines.models import request as request
from tests.engines.models import weights_of as weights_of
from tests.engines.models import write_own_sampling as write_own_sampling

VOCABULARY = 320
# A large initializer_range makes distributions peaked and seeds very different: stale weights or keys show at once.
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False),
    "qwen3_tied": Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 2}, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, head_dim=32, tie_word_embeddings=False),
    # One key-value head for all processes, and a vocabulary that no number of processes divides.
    "llama_one_key": LlamaConfig(
        **SHAPE | {"num_key_value_heads": 1, "vocab_size": VOCABULARY + 1}, head_dim=32, tie_word_embeddings=False
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=32, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,  # pyright: ignore[reportCallIssue]
        moe_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[],
    ),
}  # fmt: skip


def make_model(name: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start as constants: a missing update of them would not show
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def engine_config(folder: Path, name: str, seed: int = 0, **engine: object) -> Config:
    """Return the config of an engine that serves `make_model(name, seed)`, which is saved in `folder`."""
    make_model(name, seed).save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    config = Config()
    config.model.path = str(folder)
    config.engine.name, config.engine.max_sequences, config.engine.kv_cache_mb = "vllm", 64, 64
    config.weights.timeout_s = 60.0
    for key, value in engine.items():
        setattr(config.engine, key, value)
    return config


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + 1000 * length).integers(3, VOCABULARY, length).astype(np.int32)


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the [T - 1] log-probs of tokens 1.. of `token_ids` ([T]), by one plain forward."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float() / temperature, -1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()


def worst(
    model: torch.nn.Module, prompt_ids: np.ndarray, completion: Completion, temperature: float = 1.0
) -> np.ndarray:
    """Return the [N] distances of the completion's log-probs from those of a plain forward."""
    whole = np.concatenate([prompt_ids, completion.token_ids])
    return np.abs(logprobs_of(model, whole, temperature)[len(prompt_ids) - 1 :] - completion.logprobs)
