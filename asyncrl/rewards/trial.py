"""Calls the reward before a run is started, so that one that can never work is refused at once, with its own
message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.checks.rewards import RewardTerm, reward_terms
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.reference_answers import GRADERS, reference_completions
from asyncrl.rewards.score import Outcome
from asyncrl.schema import RewardConfig
from asyncrl.types import Completion

TEXTS = ("", "The answer is 42.")
"""Texts for the trial: the policy's output is unknown, and a reward has to score any text."""


def made_up(text: str) -> Completion:
    """A completion of one token per byte."""
    ids = np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int32)
    zeros = np.zeros(len(ids), np.int32)
    return Completion(token_ids=ids, logprobs=zeros.astype(np.float32), policy_versions=zeros, finish_reason="stop")


def try_reward(
    terms: Sequence[RewardTerm], rows: Sequence[tuple[str, dict[str, Any]]], *, timeout_s: float
) -> list[tuple[str, Outcome]]:
    """Return `(which row, score or failure)` of `TEXTS` for each of `rows`, run in a separate process with a deadline
    per call.

    Args:
        terms: those that need a network are created, to check their arguments, but not called.
        rows: (file and line, row of the data file).

    Raises:
        ConfigError: the function cannot be loaded or called, or it gave no score for any of them.
    """
    outcomes = asyncio.run(_try_all(terms, rows, timeout_s))
    refuse_unscored(terms, outcomes)
    return outcomes


def refuse_unscored(terms: Sequence[RewardTerm], outcomes: Sequence[tuple[str, Outcome]]) -> None:
    """Raises ConfigError if there are outcomes, and all are failures."""
    failed = [(where, outcome) for where, outcome in outcomes if isinstance(outcome, RewardError)]
    if failed and len(failed) == len(outcomes):
        where, error = failed[0]
        functions = " + ".join(term.name or term.function for term in terms)
        raise ConfigError(
            f"reward.function={functions} gave no score for any of {len(outcomes)} completions of the first rows. "
            f"{where}: {' '.join(str(error).split()):.400}. Fix the function or the columns of the data"
        )


def refuse_silent(
    terms: Sequence[RewardTerm], rows: Sequence[tuple[str, dict[str, Any]]], *, timeout_s: float
) -> list[str]:
    """Call each built-in reward that compares with a right answer on the rows' own answers, in every form.

    Args:
        rows: (file and line, row of the data file), of one source.

    Returns:
        Lines about rows whose own answer scores no more than an empty completion.

    Raises:
        ConfigError: that is so for all of them: the reward does not recognise right answers.
    """
    return [line for term in terms if term.function in GRADERS for line in _silent(term, rows, timeout_s)]


def _silent(term: RewardTerm, rows: Sequence[tuple[str, dict[str, Any]]], timeout_s: float) -> list[str]:
    name = term.name or GRADERS[term.function]
    term = replace(term, weight=1.0)  # with weight 0, as in distillation, every answer would be worth the same
    covered = [(where, row, reference_completions([term], row)) for where, row in rows if term.covers(row)]
    judged = [(where, row, [text for _, text in forms]) for where, row, forms in covered if forms]
    found = asyncio.run(_score_all([term], [(row, ["", *texts]) for _, row, texts in judged], timeout_s))
    lines: list[str] = []
    for (where, _, texts), (empty, *own) in zip(judged, found, strict=True):
        scores = [outcome.value for outcome in own if not isinstance(outcome, RewardError)]
        if isinstance(empty, RewardError) or max(scores, default=empty.value) > empty.value:
            continue
        lines.append(
            f"{where}: {name} gives the row's own answer {texts[0]!r:.80} no more than an empty one ({empty.value:g}), "
            "in any form"
        )
    if lines and len(lines) == len(judged):
        raise ConfigError(
            f"{lines[0]}, and so for all of the first {len(judged)} rows: the run would train on zeros. Name the "
            "column of the right answer (reward.args.column=NAME), or use a reward for answers of this kind"
        )
    return lines


def score_texts(reward: RewardConfig, asked: Sequence[tuple[dict[str, Any], list[str]]]) -> list[list[Outcome]]:
    """Return `[score or failure of each text, ...]` for each (row, its texts), called as in `try_reward`.

    Raises:
        ConfigError: the function cannot be loaded or called.
    """
    return asyncio.run(_score_all(reward_terms(reward), asked, reward.timeout_s))


async def _score_all(
    terms: Sequence[RewardTerm], asked: Sequence[tuple[dict[str, Any], list[str]]], timeout_s: float
) -> list[list[Outcome]]:
    found: list[list[Outcome]] = []
    if not asked:
        return found
    async with RewardPool(terms, workers=1, timeout_s=timeout_s) as pool:
        for row, texts in asked:
            found.append(await _scored(pool, texts, row))
    return found


async def _scored(pool: RewardPool, texts: Sequence[str], row: dict[str, Any]) -> list[Outcome]:
    """Return one outcome for each text, even if the row has no score at all."""
    try:
        return await pool.score(list(texts), row, sampled=[made_up(text) for text in texts])
    except RewardError as error:
        return [error] * len(texts)


async def _try_all(
    terms: Sequence[RewardTerm], rows: Sequence[tuple[str, dict[str, Any]]], timeout_s: float
) -> list[tuple[str, Outcome]]:
    outcomes: list[tuple[str, Outcome]] = []
    called = [term for term in terms if not term.remote]
    if called != list(terms):
        async with RewardPool([term for term in terms if term.remote], workers=1, timeout_s=timeout_s):
            pass  # created only, which checks its arguments
    if not called:
        return []
    async with RewardPool(called, workers=1, timeout_s=timeout_s) as pool:
        for where, row in rows:
            if not any(term.covers(row) for term in called):
                continue
            found = await _scored(pool, TEXTS, row)
            outcomes += [(where, outcome) for outcome in found]
            if any(isinstance(outcome, RewardError) and outcome.reason == "timed_out" for outcome in found):
                break  # a hanging function would cost its deadline for each row
    return outcomes
