"""Looks at a reward model (`reward=model`) before a run starts, from its small files alone: whether its output is one
number, and whether its tokenizer reads the conversations of the data. Its weights are loaded where it scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.chat.hub import described_in
from asyncrl.checks.architecture import of_its_decoder
from asyncrl.checks.machine import model_settings
from asyncrl.checks.rewards import RewardTerm, not_one_number
from asyncrl.data.local_tokenizer import LocalTokenizer, load_local_tokenizer
from asyncrl.errors import ConfigError

LABELS = 2
"""Outputs of a classifier whose `config.json` names none: the default of transformers, which is not written."""


def look_at_reward_model(term: RewardTerm, rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return what it cannot read, in at most one line.

    Args:
        rows: (file and line, row) of the first rows of each source.

    Raises:
        ConfigError: its output is not one number, or it can read none of `rows`.
    """
    key = f"{term.room}.model"
    folder, settings = described_in(term.model, key), model_settings(term.model)
    if folder is None or not settings:
        return []
    if why := not_one_number(settings.get("architectures") or (), _labels(settings)):
        raise ConfigError(f"{key}={term.model} {why}")
    try:
        tokenizer = load_local_tokenizer(folder)
    except ValueError as error:
        raise ConfigError(f"{key}={term.model}: {error}") from error
    if tokenizer is None:
        return []
    vocabulary = of_its_decoder(settings).get("vocab_size")
    faults = [(where, _fault(tokenizer, row["prompt"], vocabulary)) for where, row in rows if term.covers(row)]
    failed = [f"{where}: {fault}" for where, fault in faults if fault]
    if failed and len(failed) == len(faults):
        raise ConfigError(f"{key}={term.model} can read none of the first rows. {failed[0]}")
    return [f"{key}={term.model} cannot read {len(failed)} of {len(faults)} rows; {each}" for each in failed[:1]]


def _labels(settings: dict[str, Any]) -> int:
    return len(settings.get("id2label") or ()) or int(settings.get("num_labels") or LABELS)


def _fault(tokenizer: LocalTokenizer, prompt: Any, vocabulary: int | None) -> str:
    """Return why the model cannot score an answer to this prompt; empty if it can."""
    try:
        ids = _ids(tokenizer, prompt)
    except Exception as error:  # a template is code that came with the model
        return f"its chat template fails ({type(error).__name__}: {error}). Give a model that reads such conversations"
    if ids is None:
        return "the prompt is a conversation, but its tokenizer has no chat template. Save one with the tokenizer"
    pad = tokenizer.vocabulary().get(tokenizer.special.get("pad_token", ""), 0)
    largest = max([*ids, pad])
    if vocabulary is not None and largest >= vocabulary:
        return (
            f"its tokenizer gives token id {largest}, but the model has {vocabulary} tokens: the tokenizer is "
            "another model's. Save the model's own beside it"
        )
    return ""


def _ids(tokenizer: LocalTokenizer, prompt: Any) -> list[int] | None:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not tokenizer.chat_template:
        return None
    answered = [*prompt, {"role": "assistant", "content": "The answer is 42."}]
    return tokenizer.encode(tokenizer.apply_chat_template(answered), add_special_tokens=False)
