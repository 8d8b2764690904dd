"""Sizes of models that are not on this machine: `7b` is a dense decoder of the shape that models of this size have."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.memory.model_size import ModelSize, model_of

DECODERS = {
    # billions: layers, hidden, heads, key-value heads, width of a head, inner, vocabulary, tied embeddings
    0.5: (24, 896, 14, 2, 64, 4864, 151936, True),
    1.5: (28, 1536, 12, 2, 128, 8960, 151936, True),
    3.0: (36, 2048, 16, 2, 128, 11008, 151936, True),
    4.0: (36, 2560, 32, 8, 128, 9728, 151936, True),
    7.0: (28, 3584, 28, 4, 128, 18944, 152064, False),
    8.0: (36, 4096, 32, 8, 128, 12288, 151936, False),
    14.0: (48, 5120, 40, 8, 128, 13824, 152064, False),
    32.0: (64, 5120, 40, 8, 128, 27648, 152064, False),
    72.0: (80, 8192, 64, 8, 128, 29568, 152064, False),
}
"""Published dimensions of Qwen2.5, and of Qwen3 for 4 and 8."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)([bBmM])")
IN_NAME = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)([bBmM])(?![A-Za-z])")


HARDWARE = re.compile(r"^#.*\b(\d+) GPUs:", re.MULTILINE)
COMMAND = re.compile(r"#\s+[a-z ,\d]+:\s")
SETTING = re.compile(r"[a-z][\w.]*=\S+?,?")


def billions_of(text: str) -> float | None:
    """Return the size that `7b`, `0.5B` or `135m` says, in billions of parameters; None for any other text."""
    found = SIZE.fullmatch(text)
    return _billions(found) if found else None


def billions_in(name: str) -> float | None:
    """Return the size in the name of a model, as in `Qwen/Qwen2.5-32B`; None if it says none."""
    found = IN_NAME.search(name)
    return _billions(found) if found else None


def _billions(found: re.Match[str]) -> float:
    return float(found[1]) / (1 if found[2] in "bB" else 1000)


def nominal_model(billions: float) -> ModelSize:
    """Return a dense decoder of about this size: the next published one, with more or fewer layers.

    Raises:
        ConfigError: the size is 0, or larger than any that was published.
    """
    if not 0 < billions <= 1000:
        raise ConfigError(f"model={billions:g}b: give the size of the model, as model=7b")
    nearest = min(DECODERS, key=lambda known: abs(math.log(known / billions)))
    layers, hidden, heads, keys, width, inner, vocabulary, tied = DECODERS[nearest]
    layers = max(1, round(layers * billions / nearest))
    block = {
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (keys * width, hidden),
        "self_attn.v_proj": (keys * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, Any] = {
        f"model.layers.{layer}.{name}.weight": list(shape) for layer in range(layers) for name, shape in block.items()
    }
    shapes |= {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    shapes |= {} if tied else {"lm_head.weight": [vocabulary, hidden]}
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": width,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    return model_of(shapes, config)


def header_settings(recipe: Path) -> dict[str, str]:
    """Return the settings of the first command in the comment at the head of a recipe: the model, data and layout that
    it is meant for. Empty if it has no command for GPUs."""
    found: dict[str, str] = {}
    begun = False
    for line in recipe.read_text().splitlines():
        if not line.startswith("#") or (begun and COMMAND.match(line)):
            break
        begun = begun or HARDWARE.search(line) is not None
        pairs = (word.partition("=") for word in line.split() if begun and SETTING.fullmatch(word))
        found |= {key: value.rstrip(",") for key, _, value in pairs if key != "experiment"}
    return found


def header_gpus(recipe: Path) -> int:
    """Return the number of GPUs that the head of a recipe names; 0 if it names none."""
    found = HARDWARE.search(recipe.read_text())
    return int(found[1]) if found else 0
