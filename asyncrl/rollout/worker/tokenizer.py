"""Loads the model's tokenizer for a worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer

from asyncrl.chat.seam import Seam
from asyncrl.chat.turn_end import without_stop_text
from asyncrl.checks.machine import ends_of
from asyncrl.data.local_tokenizer import PROBE, LocalTokenizer, own_tokenizer
from asyncrl.environments.base import Decode, Encode
from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)


def load_tokenizer(model_path: str, own: LocalTokenizer | None = None) -> Any:
    """Load the tokenizer of `model.path`.

    Args:
        own: the result of `own_tokenizer`, if already loaded.

    Raises:
        ConfigError: `model.path` has no tokenizer.
    """
    try:
        found = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # the libraries raise nothing narrower (a KeyError, a bare Exception)
        raise ConfigError(f"model.path={model_path!r} has no tokenizer that can be loaded: {error}") from error
    own = own or own_tokenizer(model_path)
    if own and own.encode(PROBE, add_special_tokens=False) != found.encode(PROBE, add_special_tokens=False):
        log.warning(
            "model.path=%s: because of the model_type in config.json, transformers loads its tokenizer as a %s, which "
            "gives other tokens than its tokenizer.json does. It is used here: was the model trained with it?",
            *(model_path, type(found).__name__),
        )
    return found


def check_vocabulary(model_path: str, tokenizer: Any) -> int:
    """Check that the tokenizer belongs to the model next to it. Returns the number of token ids that the model knows.

    Tokens added to a tokenizer may lie beyond the model's embeddings and never be used, but not its original tokens,
    nor the one that ends a text.

    Raises:
        ConfigError: the model does not have these tokens, or has no config.
    """
    try:
        model = AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={model_path} has no config that transformers can read: {error}") from error
    end = -1 if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
    needed = max(int(tokenizer.vocab_size), end + 1)
    if needed > int(model.vocab_size):
        raise ConfigError(
            f"model.path={model_path}: its tokenizer uses token ids up to {needed - 1}, but its model's vocab_size is "
            f"{model.vocab_size}. They belong to different models: copy both from the same one"
        )
    return int(model.vocab_size)


def stop_token_ids(model_path: str, tokenizer: Any, turn_ends: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's EOS, `turn_ends` of the chat, and those in the model's own files.

    Chat models end a turn with another token than their tokenizer's EOS; without it completions would run to
    `rollout.max_new_tokens`.
    """
    ids = {tokenizer.eos_token_id, *turn_ends, *ends_of(model_path)} - {None}
    if not ids:
        log.warning(
            "model.path=%s: no token ends a completion, so each has rollout.max_new_tokens tokens. Give the tokenizer "
            "an eos_token, or the model's generation_config.json an eos_token_id",
            model_path,
        )
    return tuple(sorted(ids))


def make_decode(tokenizer: Any, end_texts: Sequence[str] = ()) -> Decode:
    """
    Args:
        end_texts: what may end a turn and is no special token; left out at the end of a text, as special tokens are.
    """
    seam = Seam(tokenizer)

    def decode(sequences: Sequence[NDArray[np.int32]], *, special: bool = False) -> list[str]:
        texts = [seam.decode(ids.tolist(), special=special) for ids in sequences]
        return texts if special else [without_stop_text(text, end_texts) for text in texts]

    return decode


def make_encode(tokenizer: Any) -> Encode:
    seam = Seam(tokenizer)

    def encode(text: str) -> NDArray[np.int32]:
        return np.asarray(seam.encode(text), dtype=np.int32)

    return encode
