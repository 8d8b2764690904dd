"""Combines several functions to one reward: the weighted sum of those that cover a row, each logged by its name."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from asyncrl.checks.rewards import RewardTerm
from asyncrl.errors import RewardError
from asyncrl.rewards.call import Call, GroupReward, failed
from asyncrl.rewards.score import NotApplicable, Outcome, RewardScore, finite

Parts = Sequence[tuple[RewardTerm, list[Outcome]]]


def combine(rewards: Sequence[tuple[RewardTerm, GroupReward]]) -> GroupReward:
    """Return the one reward of `reward.function` unchanged, or the sum of several.

    A completion fails, naming the function, if any function fails for it: a sum without one would be another reward. A
    function that returns None (TRL) is left out of the sum; if all do, the completion fails.
    """
    if len(rewards) == 1 and not rewards[0][0].name:
        return rewards[0][1]

    def score(call: Call) -> Any:
        chosen: list[tuple[RewardTerm, Any]] = [
            (term, _begin(reward, call)) for term, reward in rewards if term.covers(call.row)
        ]
        if not chosen:
            raise RewardError(uncovered(call.row.get("data_source"), [term for term, _ in rewards]))
        waiting = [found for _, found in chosen if inspect.isawaitable(found)]
        return _later(call, chosen, waiting) if waiting else _sums(call, chosen)

    return score


def uncovered(data_source: Any, terms: Sequence[RewardTerm]) -> str:
    """Message for a row that no reward covers."""
    named = sorted({source for term in terms for source in term.data_source})
    return (
        f"no reward of reward.functions is for data_source={data_source!r}; they are for {', '.join(named)}. Add it to "
        "the data_source of one of them, or leave data_source out of a reward for all rows"
    )


def _begin(reward: GroupReward, call: Call) -> Any:
    """Return the outcomes, or an awaitable of them."""
    try:
        return reward(call)
    except Exception as error:  # user code at a process boundary: its failure is an answer
        return [failed(error)] * len(call.completions)


async def _later(call: Call, chosen: Sequence[tuple[RewardTerm, Any]], waiting: Sequence[Any]) -> list[Outcome]:
    found = iter(await asyncio.gather(*waiting, return_exceptions=True))
    size = len(call.completions)
    parts: list[tuple[RewardTerm, list[Outcome]]] = []
    for term, begun in chosen:
        said: Any = next(found) if inspect.isawaitable(begun) else begun
        parts.append((term, [failed(said)] * size if isinstance(said, Exception) else said))
    return _sums(call, parts)


def _sums(call: Call, parts: Parts) -> list[Outcome]:
    return [_sum([(term, said[place]) for term, said in parts]) for place in range(len(call.completions))]


def _sum(parts: Sequence[tuple[RewardTerm, Outcome]]) -> Outcome:
    value, named, turns = 0.0, {}, ()
    for term, outcome in parts:
        if isinstance(outcome, NotApplicable):
            continue
        if isinstance(outcome, RewardError):
            return RewardError(f"{term.name}: {outcome}", outcome.reason)
        value += term.weight * outcome.value
        if outcome.turns and turns and len(outcome.turns) != len(turns):
            return RewardError(
                f"{term.name} returned `turns` for {len(outcome.turns)} turns, but another reward for {len(turns)}"
            )
        if outcome.turns:
            before = turns or (0.0,) * len(outcome.turns)
            turns = tuple(mine + term.weight * more for mine, more in zip(before, outcome.turns, strict=True))
        named[term.name] = outcome.value
        named |= {f"{term.name}/{part}": number for part, number in outcome.parts.items()}
    if not named:
        return next(outcome for _, outcome in parts if isinstance(outcome, RewardError))
    try:
        return RewardScore(value=finite(value, "the weighted sum of the rewards"), parts=named, turns=turns)
    except RewardError as error:
        return error
