"""Tiny random models of many families. `python -m tests.learner.families` writes the table of docs/models.md."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.model.layout import Layout
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.recorded import routed_tokens
from asyncrl.routers import gates_of
from asyncrl.schema import Config, DataConfig, ModelConfig, RolloutConfig, RunConfig
from asyncrl.types import ROUTED_EXPERTS, Routers, TrajectoryGroup
from tests.learner.feed import VOCABULARY, make_lease, make_step

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "shared_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("ssm_state_size", "state_size", "linear_key_head_dim", "linear_value_head_dim", "head_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **{"num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "mamba_expand": 2},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "sliding_window": 6, "mamba_d_ssm": 64},
    **{"vocab_size": VOCABULARY, "initializer_range": 0.2, "attention_chunk_size": 8, "tie_word_embeddings": False},
    **{"expand": 2, "logits_scaling": 4.0, "logit_scale": 0.25, "lm_head_multiplier": 0.5},
}
"""Config field -> value, used by every config that has the field."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen2-MoE": ("qwen2_moe", {}),
    "Qwen3-MoE": ("qwen3_moe", {}),
    "Mistral": ("mistral", {}),
    "Mixtral": ("mixtral", {}),
    "Gemma 3 (text)": ("gemma3_text", {}),
    "Phi-3": ("phi3", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {}),
    "GLM-4": ("glm4", {}),
    "GLM-4-MoE": ("glm4_moe", {}),
    "SmolLM3": ("smollm3", {}),
    "Granite": ("granite", {}),
    "Cohere 2": ("cohere2", {}),
    "EXAONE 4": ("exaone4", {}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "Apertus": ("apertus", {}),
    "StarCoder2": ("starcoder2", {}),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPT-2": ("gpt2", {}),
    "OPT": ("opt", {}),
    "DeepSeek-V3": ("deepseek_v3", {"num_key_value_heads": 4, "head_dim": 4}),
    "Llama 4 (text)": ("llama4_text", {}),
    "Qwen3-Next": ("qwen3_next", {}),
    "Qwen3.5 (text)": ("qwen3_5_text", {}),
    "Granite 4 hybrid": ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2}),
    "MiniMax": ("minimax", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "Mamba": ("mamba", {}),
    "Mamba 2": ("mamba2", {"num_heads": 8}),
    "Jamba": (
        "jamba",
        {
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
            **{"mamba_dt_rank": 4, "use_mamba_kernels": False},
        },
    ),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "Falcon-H1": ("falcon_h1", {}),
    "Bamba": ("bamba", {"attn_layer_indices": [1, 3]}),
    "Nemotron-H": ("nemotron_h", {"hybrid_override_pattern": "M*M-", "layers_block_type": None}),
    "OLMo hybrid": ("olmo_hybrid", {}),
    "BLOOM": ("bloom", {}),
    "MPT": ("mpt", {"logit_scale": None}),
    "RWKV": ("rwkv", {}),
    "StableLM": ("stablelm", {}),
    "Phi-3.5-MoE": ("phimoe", {}),
    "Gemma 2": ("gemma2", {}),
    "Cohere": ("cohere", {}),
    "GPT-OSS": ("gpt_oss", {}),
    "ModernBERT decoder": ("modernbert-decoder", {}),
    "DeepSeek-V4": ("deepseek_v4", {}),
    "GPT-J": ("gptj", {"rotary_dim": 4}),
    "GPT-Neo": ("gpt_neo", {"attention_types": [[["global", "local"], 2]], "window_size": 6}),
}
"""Name -> (transformers' model type, settings specific to the family)."""
BEGIN, END = "<!-- families: begin (written by python -m tests.learner.families) -->", "<!-- families: end -->"


def tiny_family(name: str) -> PreTrainedModel:
    """Return a random model with weights so large that every layer affects the log-probs."""
    kind, own = FAMILIES[name]
    default = AutoConfig.for_model(kind)
    fields = {key: value for key, value in SIZES.items() if hasattr(default, key)} | own
    settings = type(default)(**fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.15)
        for each in (buffer for key, buffer in model.named_buffers() if key.endswith("tid2eid")):
            # If all zero, it names the same expert twice for each token, and the router between them has no gradient.
            each.copy_(torch.rand(len(each), settings.n_routed_experts).argsort(-1)[:, : each.shape[1]])
    return model


def settings_for(folder: Path) -> Config:
    return Config(
        run=RunConfig(name="t"),
        model=ModelConfig(path=str(folder)),
        data=DataConfig(path="rows.jsonl", max_prompt_tokens=10),
        rollout=RolloutConfig(max_new_tokens=12),
    )


def build(name: str, folder: Path) -> PolicyModel:
    """Build the model as a run does.

    Raises:
        ConfigError: the family is refused.
    """
    tiny_family(name).save_pretrained(folder)
    return build_model(settings_for(folder), torch.device("cpu"), None)


def siblings(routers: Routers | None = None) -> MicroBatch:
    """Return a micro-batch of two groups of three trajectories with shared prompts.

    Args:
        routers: if given, record random experts for these routers, for all tokens before the last sampled one.
    """
    plan, groups = make_step(3, groups=2, size=3, max_staleness=4)
    rng = np.random.default_rng(1)
    made = [group if routers is None else routed(group, routers, rng) for group in groups]
    return pack(make_lease(plan, made), plan.shards[0], torch.device("cpu"), routers=routers)


def routed(group: TrajectoryGroup, routers: Routers, rng: np.random.Generator) -> TrajectoryGroup:
    """Return the group with experts drawn at random, the same for the shared prompt of all its trajectories."""
    prompt = drawn(group.trajectories[0].prompt_length, routers, rng)
    rest = [drawn(routed_tokens(each) - len(prompt), routers, rng) for each in group.trajectories]
    extras = [{ROUTED_EXPERTS: np.concatenate([prompt, each])} for each in rest]
    pairs = zip(group.trajectories, extras, strict=True)
    return replace(group, trajectories=tuple(replace(each, extras=given) for each, given in pairs))


def drawn(tokens: int, routers: Routers, rng: np.random.Generator) -> np.ndarray:
    """Return [tokens, layers, k] random experts, independent of the routers."""
    table = rng.random((tokens, routers.layers, routers.experts)).argsort(-1)[..., : routers.chosen]
    return table.astype(routers.dtype)


def told_what_to_choose(hf: PreTrainedModel, routing: Tensor) -> None:
    """Replace the model's gates by ones that choose the experts of `routing`, by the papers' formulas and in the dtype
    of the model.

    Args:
        routing: [T, layers, k] experts of one sequence; negative ones are chosen by the gate itself.
    """

    def forward(place: int, gate: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T.to(hidden.dtype)  # some gates are always float32
        own = logits.topk(gate.top_k, -1).indices
        chosen = torch.where(routing[:, place] < 0, own, routing[:, place].long())
        mask = torch.zeros_like(logits).scatter(-1, chosen, 1.0)
        if hf.config.model_type in ("deepseek_v3", "glm4_moe"):
            gates = mask / (1 + (-logits).exp())
        else:
            gates = mask * logits.exp()  # eq. 6 of R3
            if not getattr(gate, "norm_topk_prob", True):
                gates = mask * logits.exp() / logits.exp().sum(-1, keepdim=True)
        if getattr(gate, "norm_topk_prob", True):
            gates = gates / gates.sum(-1, keepdim=True)
        return logits, gates.gather(-1, chosen) * getattr(gate, "routed_scaling_factor", 1.0), chosen

    for place, (_, gate) in enumerate(gates_of(hf)):
        gate.forward = MethodType(lambda gate, hidden, place=place: forward(place, gate, hidden), gate)


def trained_logprobs(model: PolicyModel, batch: MicroBatch) -> Tensor:
    """Return the [chosen] log-probs of the trained tokens, in the order of the sequences."""
    scored = model(batch, 1.0)[0]
    return scored[batch.loss_positions]


def logprobs_alone(hf: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the log-probs of the trained tokens by transformers, one sequence at a time."""
    return scores_alone(hf, batch)[0]


def scores_alone(hf: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return log-probs of the trained tokens and entropies of their distributions, one sequence at a time."""
    parts, entropies = [], []
    index, edges = batch.packing.rows.index, batch.packing.cu_seqlens.tolist()
    for first, last in pairwise(edges):
        places = index[first:last]
        ids = batch.input_ids[places]
        if batch.packing.routing is not None:
            told_what_to_choose(hf, batch.packing.routing[places])
        logits = hf(input_ids=ids[None], use_cache=False).logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        table, wanted = logits[:-1].log_softmax(-1), batch.loss_mask[places][1:]
        parts.append(table.gather(-1, ids[1:, None])[:, 0][wanted])
        entropies.append(-(table.exp() * table).sum(-1)[wanted])
    return torch.cat(parts), torch.cat(entropies)


def values_alone(hf: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return a critic's values of the states in which the trained tokens were sampled, one sequence at a time."""
    parts = []
    index, edges = batch.packing.rows.index, batch.packing.cu_seqlens.tolist()
    for first, last in pairwise(edges):
        places = index[first:last]
        values = hf(input_ids=batch.input_ids[places][None], use_cache=False).logits[0, :, 0].float()
        parts.append(values[:-1][batch.loss_mask[places][1:]])
    return torch.cat(parts)


def outcome(name: str, folder: Path) -> str:
    """Return the cell of the table: how the family's sequences are trained, or why it is refused."""
    try:
        model = build(name, folder)
    except ConfigError as error:
        return f"refused: {_reason(str(error))}"
    return "packed" if model.layout is Layout.PACKED else "a row each"


def batched(name: str) -> str:
    """Return `yes`, or `no` if the built-in engine refuses the family."""
    try:
        with torch.inference_mode():
            ModelRunner(tiny_family(name), torch.device("cpu"), 2).check_model()
    except ConfigError:
        return "no"
    return "yes"


def _reason(text: str) -> str:
    return text.partition(": ")[2].partition("; ")[0].partition(": ")[0]


def table(outcomes: Mapping[str, tuple[str, str]]) -> str:
    lines = ["| family | `model_type` | built-in engine | sequences |", "|---|---|---|---|"]
    lines += [f"| {name} | `{FAMILIES[name][0]}` | {' | '.join(outcomes[name])} |" for name in FAMILIES]
    return "\n".join(lines)


def main(page: Path) -> None:
    outcomes = {}
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            outcomes[name] = batched(name), outcome(name, Path(folder))
            print(name, outcomes[name], flush=True)
    text = page.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{table(outcomes)}\n\n{END}{after}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/models.md"))
