"""Finds reasons against training a model in its `config.json` alone: without torch, hence before anything starts.

`settings` are always those of `config.json`. A function that returns why something is impossible returns an empty text
if it is possible, or if the file does not say. What is missing there is checked when the model is loaded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from asyncrl.checks.problem import divisors
from asyncrl.schema import Config

OF_LOGITS = (
    *("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling"),
    *("output_multiplier_scale", "lm_head_multiplier"),
)
"""Fields of models whose logits are more than `lm_head(hidden)`: the learner would compute other log-probs..."""
MULTIPLIED = {
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), ("logit_scale", 1)),
    "falcon_h1": ("lm_head_multiplier", 1),
    "hyperclovax": ("logits_scaling", 1),
    **dict.fromkeys(("granite", "granite_swa", "granitemoe", "granitemoe_swa"), ("logits_scaling", -1)),
    **dict.fromkeys(("granitemoehybrid", "granitemoeshared", "minicpm3"), ("logits_scaling", -1)),
}
"""... but for these model types, whose logits are multiplied by the field (1) or divided by it (-1), and nothing else:
`logit_factor`."""
OF_SCORES = ("attn_logit_softcapping",)
"""Fields of models that change attention scores in a way that packed attention does not implement."""
SINKS = ("gpt_oss", "mimo_v2_flash")
"""Model types with a learned sink in every attention."""
COMPUTED_TOGETHER = (
    *("apertus", "cohere2", "ernie4_5", "exaone4", "gemma3_text", "glm4", "gpt_neox", "granite", "llama", "mistral"),
    *("olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"),
)
"""Model types whose layers several ranks may compute together, as tested in `tests/learner/parallel/test_parallel.py`.
"""
BY_ROWS, BY_COLUMNS, FUSED = "by rows", "by columns", "fused"
SPLIT_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "query_key_value"), BY_ROWS),
    **dict.fromkeys(("gate_proj", "up_proj", "c_fc", "dense_h_to_4h"), BY_ROWS),
    **dict.fromkeys(("o_proj", "dense", "down_proj", "c_proj", "dense_4h_to_h"), BY_COLUMNS),
    **dict.fromkeys(("qkv_proj", "gate_up_proj"), FUSED),
}
"""Last name of a layer -> how its weight is split over ranks that compute together. Fused are several layers in one
matrix, split by rows: its ranks hold neighbouring ones, so it is gathered for the computation, and each computes with
its rows of each of the layers. The plans of transformers say the same of every family (`tests/learner/parallel`)."""

SHARED = (
    *(
        "apertus",
        "cohere2",
        "deepseek_v3",
        "ernie4_5",
        "exaone4",
        "gemma3_text",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_neox",
    ),
    *("granite", "llama", "mistral", "mixtral", "olmo2", "olmo3", "opt", "phi3", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "smollm3", "starcoder2"),
)
"""Model types whose sequences several ranks may share: those that are packed, tested there as well."""
EXPERTS_APART = ("deepseek_v3", "glm4_moe", "mixtral", "qwen2_moe", "qwen3_moe")
"""Model types whose experts may be spread over several ranks, tested there as well."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in transformers' configs."""
ROUTERS_FOLLOW = EXPERTS_APART
"""Model types whose routers can be made to choose given experts: the formula of their weights is tested
(`tests/learner/model/test_routing.py`)."""
SENSES = {
    **dict.fromkeys(("vision_config", "vq_config"), "images"),
    **dict.fromkeys(("audio_config", "speech_config", "codec_config"), "audio"),
    **dict.fromkeys(("thinker_config", "talker_config"), "audio and images"),
}
"""Parts of a `config.json` that read or write other things than text."""
TEXT_ALONE = (
    *("emu3", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "llama4", "mllama"),
    *("phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
)
"""Model types with such parts that transformers loads as causal LMs all the same."""
BLOCK = 32
"""With `learner.optimizer=adamw_8bit`, the number of consecutive elements in a row whose one-byte moments share a scale
in fp32. Tensor parallelism over 8 ranks cuts rows of the usual widths into whole blocks."""
GUESSED_FROM_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding that depend on the largest position in their input, which differs between ranks, and
between a pack and a single sequence."""
ATTEND_TO_ALL = ("gpt2", "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose layers attend to all earlier tokens, unless their `config.json` says otherwise."""
UNBOUNDED = sys.maxsize
"""Length of an episode that is limited only by the engine."""


def of_its_decoder(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the text decoder, which multimodal models keep separately."""
    text = settings.get("text_config")
    return text if text and isinstance(text, Mapping) else settings


def _kind_of(settings: Mapping[str, Any]) -> str | None:
    """The model type of the decoder, or of the whole model."""
    return of_its_decoder(settings).get("model_type") or settings.get("model_type")


def _counted(count: Any) -> TypeGuard[int]:
    return isinstance(count, int) and count > 0


def _untested(setting: str, kinds: Sequence[str], kind: str | None, way_out: str) -> str:
    return (
        "" if kind in kinds else f"{setting} is only tested for {', '.join(kinds)}, and this is {kind}. Set {way_out}"
    )


def foreign_maths(settings: Mapping[str, Any]) -> str:
    """Return what the model computes and the learner does not; empty if nothing is known."""
    text, kind = of_its_decoder(settings), _kind_of(settings)
    known = MULTIPLIED[str(kind)][0] if logit_factor(settings) != 1.0 else ""
    logits = [name for name in OF_LOGITS if text.get(name) not in (None, 1.0) and name != known]
    if logits:
        return (
            f"{kind} applies {', '.join(logits)} to its logits, which the learner does not; use a model whose logits "
            "are lm_head(hidden)"
        )
    scores = [name for name in OF_SCORES if text.get(name) is not None]
    scores += ["attention sinks"] if kind in SINKS else []
    if scores:
        return (
            f"{kind} has {', '.join(scores)}, which packed attention does not compute; use a plain causal decoder "
            "(Llama, Qwen2, Qwen3, Mistral)"
        )
    return ""


def not_of_text(settings: Mapping[str, Any]) -> str:
    """Return why a model does not write text from text alone; empty if it does, or if nothing is known about it."""
    kind = settings.get("model_type")
    if settings.get("is_encoder_decoder"):
        return (
            f"{kind} is an encoder-decoder, and the learner trains decoders only: what its encoder needs (audio, "
            "images, a source text) is in no row. Give a causal decoder (Llama, Qwen2, Qwen3, Mistral)"
        )
    senses = [sense for part, sense in SENSES.items() if part in settings]
    if senses and kind not in TEXT_ALONE:
        return (
            f"{kind} is a model of {' and '.join(dict.fromkeys(senses))}, which transformers cannot load as a model of "
            f"text alone, and the policy reads text only. Give a text model, or one of {', '.join(TEXT_ALONE)}"
        )
    return ""


def logit_factor(settings: Mapping[str, Any]) -> float:
    """By what the model multiplies `lm_head(hidden)`; 1 where it does not, or where that is no number above 0."""
    text = of_its_decoder(settings)
    name, sign = MULTIPLIED.get(str(text.get("model_type")), ("", 1))
    factor = text.get(name)
    return float(factor) ** sign if isinstance(factor, int | float) and 0 < factor < math.inf else 1.0


def quantized(settings: Mapping[str, Any]) -> str:
    """Return why the weights cannot be trained as they are stored; empty if they can."""
    given = settings.get("quantization_config")
    if not given or (isinstance(given, Mapping) and given.get("dequantize")):
        return ""
    method = given.get("quant_method", "") if isinstance(given, Mapping) else ""
    return (
        f"its weights are quantized ({method or 'quantization_config in its config.json'}), and quantized weights "
        "cannot be trained. Give the model that it was made from"
    )


def may_forget(settings: Mapping[str, Any]) -> bool:
    """Return whether layers of a model may attend to less than all earlier tokens; False if its `config.json` rules
    that out or names no model type."""
    text = of_its_decoder(settings)
    kinds = text.get("layer_types") or ()
    told = isinstance(kinds, list | tuple) and all(kind == "full_attention" for kind in kinds)
    windows = text.get("use_sliding_window") is True
    return bool(text.get("model_type")) and (text["model_type"] not in ATTEND_TO_ALL or windows or not told)


def not_together(settings: Mapping[str, Any], ranks: int) -> str:
    """Return why `learner.tensor_parallel=ranks` cannot split the layers of a model; empty if it can."""
    text, kind = of_its_decoder(settings), _kind_of(settings)
    if ranks == 1:
        return ""
    way_out = "learner.tensor_parallel=1: FSDP2 shards any model"
    if problem := _untested(f"learner.tensor_parallel={ranks}", COMPUTED_TOGETHER, kind, way_out):
        return problem
    heads = text.get("num_attention_heads")
    counts = {
        "attention heads": heads,
        "key-value heads": text.get("num_key_value_heads") or heads,
        "numbers within its feed-forward layer (intermediate_size)": text.get("intermediate_size"),
    }
    # Values that config.json leaves to the class's defaults are checked when the model is loaded.
    known = {what: count for what, count in counts.items() if _counted(count)}
    for what, count in known.items():
        if count % ranks:
            fits = ", ".join(map(str, divisors(math.gcd(*known.values()))))
            return f"{count} {what} cannot be split over learner.tensor_parallel={ranks} ranks. Set it to one of {fits}"
    return ""


def not_in_blocks(settings: Mapping[str, Any], ranks: int) -> str:
    """Return why `learner.optimizer=adamw_8bit` cannot be used with `learner.tensor_parallel=ranks`, which has passed
    `not_together`; empty if it can."""
    text = of_its_decoder(settings)
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    each = text.get("head_dim") or (hidden // heads if _counted(heads) and _counted(hidden) else 0)
    # Widths of the rows that are split: of the layers after attention and within the feed-forward layer.
    for width in (heads * each if _counted(heads) and _counted(each) else 0, text.get("intermediate_size")):
        if _counted(width) and (problem := torn_blocks(width, width // ranks)):
            return problem
    return ""


def torn_blocks(width: int, part: int) -> str:
    """Return why a rank cannot have `part` elements of a row of `width`; empty if it can, or the row has no blocks."""
    if width % BLOCK or part % BLOCK == 0:
        return ""
    return (
        f"learner.optimizer=adamw_8bit has one scale for {BLOCK} numbers of a row, but learner.tensor_parallel cuts "
        f"rows of {width} into parts of {part}, which is not a multiple of {BLOCK}. Use a smaller "
        "learner.tensor_parallel or learner.optimizer=adamw"
    )


def not_shared(settings: Mapping[str, Any], ranks: int, together: int = 1) -> str:
    """Return why `learner.sequence_parallel=ranks` cannot share the sequences of a model; empty if it can.

    Args:
        together: `learner.tensor_parallel`, which has passed `not_together`, and by which each rank's number of heads
            is divided.
    """
    text, kind = of_its_decoder(settings), _kind_of(settings)
    if ranks == 1:
        return ""
    if problem := _untested(f"learner.sequence_parallel={ranks}", SHARED, kind, "learner.sequence_parallel=1"):
        return problem
    for guessing, _ in _guessing(text):
        return (
            f"its rotary embedding ({guessing}) depends on the longest sequence it is given, and no rank has whole "
            "sequences. Set learner.sequence_parallel=1"
        )
    heads = text.get("num_attention_heads") or text.get("n_head")  # GPT-2 calls it n_head
    keys = text.get("num_key_value_heads") or heads
    if not _counted(heads) or not _counted(keys):
        return ""  # values that config.json leaves to the class's defaults are checked when the model is loaded
    heads, keys = heads // together, keys // together
    if heads % ranks or max(keys, ranks) % min(keys, ranks):
        each = f" (those of one of learner.tensor_parallel={together} ranks)" if together > 1 else ""
        fits = [n for n in divisors(heads) if max(keys, n) % min(keys, n) == 0]
        return (
            f"learner.sequence_parallel={ranks} must divide its {heads} attention heads, and divide its {keys} "
            f"key-value heads or be a multiple of them{each}. Set it to one of {', '.join(map(str, fits))}"
        )
    return ""


def longest_sequence(config: Config) -> int:
    """Return the limit that the settings put on the tokens of a trained sequence; `UNBOUNDED` if there is none."""
    if config.environment.name == "single_turn":
        return config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return config.environment.max_tokens or config.engine.max_model_len or UNBOUNDED


def _guessing(text: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Iterate over kind and settings of the rotary embeddings that depend on the longest sequence in their input; there
    may be one per kind of layer."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    for each in (rope, *rope.values()) if isinstance(rope, Mapping) else ():
        kind = each.get("rope_type", each.get("type")) if isinstance(each, Mapping) else None
        if isinstance(kind, str) and kind in GUESSED_FROM_LENGTH:
            yield kind, each


def too_long_to_guess(settings: Mapping[str, Any], longest: int) -> str:
    """Return why sequences of up to `longest` tokens have different log-probs together than alone; empty if they do
    not."""
    text = of_its_decoder(settings)
    for kind, rope in _guessing(text):
        limit = text.get("max_position_embeddings")
        if kind == "longrope":
            # The same order as in transformers.
            limit = text.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
            limit = None if rope.get("long_factor") == rope.get("short_factor") else limit
        if _counted(limit) and longest > limit:
            return (
                f"its rotary embedding ({kind}) changes for a whole batch as soon as one sequence has more than "
                f"{limit} tokens, so the log-probs of the shorter ones would depend on the sequences beside them. "
                f"Sequences here may have {longest if longest < UNBOUNDED else 'any number of'} tokens. Keep them "
                f"within {limit} (prompt and completion together; environment.max_tokens bounds episodes of several "
                "turns)"
            )
    return ""


def experts_in(settings: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer; 0 if there are none or only one, or if their number has another name."""
    text = of_its_decoder(settings)
    counts = (text.get(name) for name in EXPERT_COUNTS)
    return max((count for count in counts if isinstance(count, int) and count > 1), default=0)


def not_apart(settings: Mapping[str, Any], ranks: int) -> str:
    """Return why `learner.expert_parallel=ranks` cannot spread the experts of a model; empty if it can, or the model
    has none."""
    kind, experts = _kind_of(settings), experts_in(settings)
    if ranks == 1 or not experts:
        return ""
    way_out = "learner.expert_parallel=1: FSDP2 shards any model"
    if problem := _untested(f"learner.expert_parallel={ranks}", EXPERTS_APART, kind, way_out):
        return problem
    if experts % ranks:
        fits = map(str, divisors(experts))
        return f"learner.expert_parallel={ranks} must divide its {experts} experts. Set it to one of {', '.join(fits)}"
    return ""


def not_replayed(settings: Mapping[str, Any]) -> str:
    """Return why `learner.router_replay=true` cannot make a model choose the engine's experts; empty if it can."""
    kind = _kind_of(settings)
    if kind not in ROUTERS_FOLLOW and not experts_in(settings):
        return f"learner.router_replay=true is for mixtures, and {kind} has no experts to choose. Set it to false"
    return _untested("learner.router_replay=true", ROUTERS_FOLLOW, kind, "it to false")
