"""A reward model: a Hugging Face sequence or token classifier with one output, called like TRL's reward functions.

Only the process that runs it imports this module (`reward.function=asyncrl.rewards.reward_model:RewardModel`):
everything else about rewards needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from asyncrl.chat.base import encode_text
from asyncrl.checks.loaded_weights import refuse_unequal
from asyncrl.checks.rewards import not_one_number
from asyncrl.errors import ConfigError, RewardError

BATCH_TOKENS = 16384
"""Padded tokens of one forward pass; bounds memory whatever the size of a group."""
MODEL_CLASSES = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}

Text = str | list[dict[str, Any]]
"""Plain text, or the messages of a conversation."""


class RewardModel:
    """`model(prompts, completions) -> rewards`, the raw output (logit) for each prompt with its completion.

    A sequence classifier scores the whole text; a token classifier is read at the last token. Conversations are
    rendered with the reward model's own chat template; plain prompt and completion are concatenated, and get the
    special tokens that its tokenizer adds to a text (a [CLS] is what a BERT is read at).

    Args:
        path: folder or hub name of the model with its tokenizer. Runs on the GPU if this process sees one, in the
            checkpoint's dtype.

    Raises:
        ConfigError: no such model, not one of the two kinds, or not exactly one output.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            settings = AutoConfig.from_pretrained(path, trust_remote_code=False)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"reward.model={path} cannot be loaded with its tokenizer: {error}") from error
        self._per_token = check_kind(path, settings) == "ForTokenClassification"
        self._own_pad = settings.get_text_config().pad_token_id
        self._model = load_model(path, settings, self._tokenizer.pad_token_id).to(self._device)
        embeddings: Any = self._model.get_input_embeddings()
        self._longest = getattr(settings, "max_position_embeddings", None)
        self._vocabulary = embeddings.num_embeddings
        pad = self._tokenizer.pad_token_id
        if pad is not None and pad >= self._vocabulary:
            raise ConfigError(
                f"reward.model={path}: its tokenizer pads with token id {pad}, but the model has {self._vocabulary} "
                "tokens: the tokenizer is another model's. Save the model's own beside it"
            )

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[float]:
        """[G] rewards. Raises RewardError for a text that is empty or longer than the model accepts."""
        rows = [self._token_ids(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]
        rewards = [0.0] * len(rows)
        for members in batches([len(row) for row in rows], padded=self._tokenizer.pad_token_id is not None):
            for member, reward in zip(members, self._score([rows[m] for m in members]), strict=True):
                rewards[member] = reward
        return rewards

    def _token_ids(self, prompt: Text, completion: Text) -> list[int]:
        text = self._join(prompt, completion)
        # A chat template writes the special tokens itself: adding them would double the BOS.
        is_text = isinstance(prompt, str)
        ids = encode_text(self._tokenizer, text) if is_text else self._tokenizer.encode(text, add_special_tokens=False)
        if not text or not ids:
            raise RewardError("prompt and completion are empty: there is nothing to score")
        if max(ids) >= self._vocabulary:
            raise RewardError(
                f"the tokenizer of {self._path} gives token id {max(ids)}, but the model has {self._vocabulary} "
                "tokens: the tokenizer is another model's"
            )
        if self._longest is not None and len(ids) > self._longest:
            raise RewardError(
                f"a text of {len(ids)} tokens is longer than the {self._longest} tokens that {self._path} can read"
            )
        return ids

    def _join(self, prompt: Text, completion: Text) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        if isinstance(prompt, str) or isinstance(completion, str):
            raise RewardError("prompt and completion must have the same form: both conversations, or both plain text")
        if not self._tokenizer.chat_template:
            raise RewardError(f"the prompt is a conversation, but the tokenizer of {self._path} has no chat template")
        return self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)

    def _score(self, rows: Sequence[list[int]]) -> list[float]:
        pad = self._padding(rows)
        set_padding(self._model, pad)
        ids, attention = pad_rows(rows, pad or 0)
        ids, attention = ids.to(self._device), attention.to(self._device)
        logits: Tensor = self._model(input_ids=ids, attention_mask=attention).logits
        if self._per_token:
            last = attention.sum(1) - 1
            logits = logits[torch.arange(len(rows), device=self._device), last]
        return logits[:, 0].float().tolist()

    def _padding(self, rows: Sequence[list[int]]) -> int | None:
        """The token to pad `rows` with: the tokenizer's, unless that is a token of the texts (often the EOS), for which
        the model's own settings do not say that it is padding: it would be scored in front of it."""
        pad, used = self._tokenizer.pad_token_id, {token for row in rows for token in row}
        if pad is None or pad == self._own_pad or pad not in used:
            return pad
        return next((token for token in range(self._vocabulary) if token not in used), pad)


def check_kind(path: str, settings: PretrainedConfig) -> str:
    """Return `ForSequenceClassification` or `ForTokenClassification`. Raises ConfigError for a model without a single
    output."""
    names = settings.architectures or []
    if why := not_one_number(names, settings.num_labels or 0):
        raise ConfigError(f"reward.model={path} {why}")
    return next(kind for kind in MODEL_CLASSES if any(name.endswith(kind) for name in names))


def load_model(path: str, settings: PretrainedConfig, pad_token_id: int | None) -> Any:
    """Return the classifier in evaluation mode. Raises ConfigError if its weights are not those of
    its class."""
    loader = MODEL_CLASSES[check_kind(path, settings)]
    try:
        model, report = loader.from_pretrained(path, trust_remote_code=False, dtype="auto", output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"reward.model={path} cannot be loaded: {error}") from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ConfigError(
            f"reward.model={path} lacks weights ({missing}): its rewards would be random. Save the complete model"
        )
    try:
        refuse_unequal(type(model).__name__, (), report["unexpected_keys"])
    except ValueError as error:
        raise ConfigError(f"reward.model={path}: {error}") from error
    set_padding(model, pad_token_id)
    return model.eval()


def set_padding(model: Any, pad_token_id: int | None) -> None:
    """Set the id by which a sequence classifier finds the last token of a padded row; one that also sees looks for it
    in the settings of its decoder."""
    for each in (model.config, model.config.get_text_config()):
        each.pad_token_id = pad_token_id


def batches(lengths: Sequence[int], *, padded: bool) -> Iterator[list[int]]:
    """Yield positions in batches of at most BATCH_TOKENS padded tokens, short ones first; one each if not `padded`."""
    batch: list[int] = []
    for position in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (not padded or (len(batch) + 1) * lengths[position] > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(position)
    if batch:
        yield batch


def pad_rows(rows: Sequence[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return (token ids, attention mask), both [rows, longest], padded on the right."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad_token_id] * (longest - len(row)) for row in rows])
    attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, attention
