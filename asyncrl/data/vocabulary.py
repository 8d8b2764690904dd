"""Whether the critic and the reference know every token that the policy may sample.

Models of a family share a tokenizer, but often not the size of their embeddings, which is rounded up: Qwen2.5 1.5B has
151,936 rows, 7B 152,064, and their tokenizer 151,665 ids. Such a pair is accepted, because it is the ids of the
tokenizer that rows, chat templates and a trained policy use. Should the policy sample one of the other ids all the
same, the learner names it before the model without that row is asked (`refuse_unknown`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from asyncrl.checks.architecture import of_its_decoder
from asyncrl.checks.machine import model_settings
from asyncrl.data.local_tokenizer import own_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.schema import Config

WAY_OUT = (
    "Give a model with the policy's tokenizer and at least as many rows in its embeddings "
    "(model.resize_token_embeddings(N) of transformers adds rows; save the model with them)"
)


def models_beside(config: Config) -> dict[str, str]:
    """Paths of the critic and the reference that the run loads, by their settings, where not the policy's own."""
    advantage, found = config.advantage, dict[str, str]()
    if advantage.uses_critic and config.critic.path:
        found["critic.path"] = config.critic.path
    if config.reference.path and not config.reference.from_rollout:
        found["reference.path"] = config.reference.path
    return found


def refuse_smaller_vocabulary(config: Config) -> None:
    """Compare the vocabularies by the files of the models, as far as they are here.

    Raises:
        ConfigError: the critic or the reference lacks ids of the policy's tokenizer.
    """
    path = config.model.path
    policy = _rows_in(path)
    beside = {key: (other, _rows_in(other)) for key, other in models_beside(config).items()}
    smaller = {key: (other, rows) for key, (other, rows) in beside.items() if policy and rows and rows < policy}
    used = ids_of(path) if smaller else None
    if used is not None and policy is not None:
        refuse_lacking(smaller, policy, used)


def refuse_lacking(models: Mapping[str, tuple[str, int]], policy: int, used: int | None) -> None:
    """Raises ConfigError: one of `models` has fewer rows than there are ids in use.

    Args:
        models: path and number of rows by setting.
        policy: rows of the policy.
        used: ids of the policy's tokenizer; None if not known, and any id of the policy may be in use.
    """
    needed = policy if used is None else min(policy, used)
    for key, (path, rows) in models.items():
        if rows < needed:
            what = "the policy has" if used is None else "the policy's tokenizer has"
            raise ConfigError(
                f"{key}={path} must know every token that the policy may sample: its vocabulary has {rows:,} ids, and "
                f"{what} {needed:,}. {WAY_OUT}"
            )


def refuse_unknown(key: str, rows: int, sequences: Iterator[NDArray[np.int32]]) -> None:
    """Raises ConfigError: a token of `sequences` has no row in the model of the setting `key`, which has `rows`."""
    largest = max((int(each.max()) for each in sequences if each.size), default=0)
    if largest >= rows:
        raise ConfigError(
            f"{key}: the policy sampled token id {largest:,}, which is beyond its tokenizer, and this model's "
            f"vocabulary has {rows:,} ids. {WAY_OUT}, then go on with resume=auto"
        )


def ids_of(path: str) -> int | None:
    """One more than the largest id of the tokenizer of a model; None if it has no `tokenizer.json` here."""
    tokenizer = own_tokenizer(path)
    return None if tokenizer is None else max(tokenizer.vocabulary().values(), default=-1) + 1


def _rows_in(path: str) -> int | None:
    rows = of_its_decoder(model_settings(path)).get("vocab_size")
    return rows if isinstance(rows, int) else None
