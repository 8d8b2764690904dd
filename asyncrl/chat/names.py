"""Possible values of `model.renderer`. Kept apart from the rendering library, whose import takes seconds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from asyncrl.chat.hub import described_in

AUTO, DEFAULT = "auto", "default"

FAMILIES: dict[str, tuple[str, ...]] = {
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
    "deepseek_v4": ("deepseek-v4",),
    "gemma4": ("gemma4",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm_moe_dsa": ("glm-5", "glm-5.1", "glm-5.3"),
    "gpt_oss": ("gpt-oss",),
    "hunyuan_v3_moe": ("hy3",),
    "inkling": ("inkling",),
    "kimi_k2": ("kimi-k2",),
    "kimi_k25": ("kimi-k2.5",),
    "laguna": ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
    "llama": ("llama-3",),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_vl": ("qwen3-vl",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
}
"""`model_type` of a config.json -> the renderers that its models may have. This table does not decide between them: the
chosen one gives the same ids as the tokenizer's own chat template."""

RENDERERS = (DEFAULT, *dict.fromkeys(name for names in FAMILIES.values() for name in names))
"""All renderers of the library, by name."""


def candidates(model_path: str) -> tuple[str, ...]:
    """The renderers of the model's family, by its config.json. Raises ConfigError as `described_in`."""
    folder = described_in(model_path) or Path(model_path)
    try:
        model_type = json.loads((folder / "config.json").read_text()).get("model_type", "")
    except (OSError, ValueError, AttributeError):
        return ()
    return FAMILIES.get(model_type, ())


def tells_of_tools(template: str) -> bool:
    """Whether a chat template has a place for tools."""
    return re.search(r"\btools\b", template) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a renderer can do with a tokenizer."""

    name: str
    template: str
    """The tokenizer's chat template; empty if there is none."""
    chosen: bool
    """Whether the user named the renderer."""
    parser: bool
    """Whether `model.chat.tool_parser` is given."""

    @property
    def why_single(self) -> str:
        """Why the renderer can be used for a single turn only; empty if it can be used for several."""
        if not self.template and self.name == DEFAULT:
            return "the tokenizer has no chat template. Use an instruction-tuned model"
        if self.name != DEFAULT or self.chosen:
            return ""
        return (
            "no renderer writes the chat template of this tokenizer, so what follows a sampled turn can only be "
            "guessed from the template. Set model.renderer=default to accept that (earlier turns stay as they were "
            "sampled, even where the template would drop their reasoning), or set the renderer of the model that it "
            "was made from"
        )

    def why_no_calls(self, *, told: bool) -> str:
        """Why the policy can never make a call in the template's own form; empty if it can.

        Args:
            told: whether the template is to describe the tools to the policy.
        """
        if self.name != DEFAULT:
            return ""
        if not self.parser:
            return (
                "model.renderer=default reads no tool calls: every reply would be an answer. Name their format, "
                "model.chat.tool_parser=qwen3 (Hermes' form) or another, or set model.renderer to the renderer of the "
                "model"
            )
        if told and not tells_of_tools(self.template):
            return (
                "the chat template has no place for `tools`, so the policy would never see them. Set "
                "environment.args.tell=false and describe them in environment.args.system, or use a model whose "
                "template has one"
            )
        return ""
