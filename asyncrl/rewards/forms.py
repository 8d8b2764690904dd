"""The supported forms of reward functions, told apart by the names of their parameters:

    ours:  f(completion, row) -> number or {"score": number, ...}; may also name completion_ids, finish_reason,
           turns
    verl:  compute_score(data_source, solution_str, ground_truth, extra_info=None)
           compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list, one entry per completion
    TRL:   f(prompts, completions, completion_ids, **columns) -> list, one entry per completion, None where it does
           not apply

Each may be async: what is awaited for a group, and for other groups, runs concurrently.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from inspect import Parameter
from typing import Any

from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.call import PER_COMPLETION, UNTIMED, Call, CallClock, GroupReward, Row, failed
from asyncrl.rewards.score import NotApplicable, Outcome, to_score
from asyncrl.rewards.wire import TOGETHER, WHOLE

Function = Callable[..., Any]
Parameters = Mapping[str, Parameter]
IDS = ("completion_ids", "completions_ids")
"""TRL's documentation has used both."""
CANCEL_S = 0.5
"""Seconds for a cancelled call to close its resources; less than the pool waits for a silent process past a
deadline."""
ABSENT = ("trainer_state",)
"""Arguments that TRL passes and a reward process does not have: None if they are named."""
LOG_EXTRA, LOG_METRIC = "log_extra", "log_metric"
"""TRL's functions `log_extra(column, values)`, one value per completion, and `log_metric(name, value)`, of the batch;
numbers become parts of the reward."""


def looks_at_tokens(function: Function) -> bool:
    """Whether it uses token ids, turns, or finish reasons; TRL's form with `**kwargs` may read ids from there."""
    parameters = inspect.signature(function).parameters
    if parameters.keys() & {*IDS, *PER_COMPLETION}:
        return True
    return "completions" in parameters and any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def adapt_reward(function: Function, name: str, clock: CallClock = UNTIMED) -> GroupReward:
    """Adapt any supported form. Raises ConfigError if the function could never be called."""
    parameters = inspect.signature(function).parameters
    if {"solution_str", "ground_truth"} <= parameters.keys():
        return _adapt_verl(function, name, parameters, clock, batch=False)
    if {"solution_strs", "ground_truths"} <= parameters.keys():
        return _adapt_verl(function, name, parameters, clock, batch=True)
    # Our form names completion_ids for one completion; TRL's beside `completions`, or alone with **kwargs.
    if "completions" in parameters or (parameters.keys() & set(IDS) and "completion" not in parameters):
        return _adapt_trl(function, name, parameters, clock)
    return _adapt_ours(function, name, parameters, clock)


def _adapt_ours(function: Function, name: str, parameters: Parameters, clock: CallClock) -> GroupReward:
    asked = [each for each in PER_COMPLETION if each in parameters]
    free = [each for each in parameters.values() if each.name not in asked]
    positional = [each for each in free if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    starred = any(each.kind is each.VAR_POSITIONAL for each in free)
    required = [each.name for each in positional if each.default is each.empty]
    missing = [each.name for each in free if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    if len(required) > 2 or missing or (len(positional) < 2 and not starred):
        lacking = f" It needs {', '.join(required[2:] + missing)}: give reward.args." if required[2:] + missing else ""
        raise ConfigError(
            f"{name}{inspect.signature(function)} cannot be called as f(completion, row), "
            "compute_score(data_source, solution_str, ground_truth, extra_info), its batch form or f(prompts, "
            f"completions, **columns).{lacking}"
        )

    def score(call: Call) -> Any:
        told = {each: call.of_each(each) for each in asked}

        def one(place: int) -> Any:
            more = {each: values[place] for each, values in told.items()}
            return function(call.completions[place], deepcopy(call.row), **more)

        return _score_each(one, len(call.completions), name, clock)

    return score


def _adapt_verl(function: Function, name: str, parameters: Parameters, clock: CallClock, *, batch: bool) -> GroupReward:
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    def score(call: Call) -> Any:
        source, truth, extra = _verl_columns(call.row, name)
        texts, size = call.completions, len(call.completions)
        given = {"data_source": source, "ground_truth": truth, "extra_info": extra}
        given = {f"{key}s": _for_each(value, size) for key, value in given.items()} if batch else given
        given = {key: value for key, value in given.items() if takes_any or key in parameters}
        if batch:
            return _score_together(lambda: function(solution_strs=texts, **given), size, name, clock)
        return _score_each(lambda place: function(solution_str=texts[place], **deepcopy(given)), size, name, clock)

    return score


def _verl_columns(row: Row, name: str) -> tuple[Any, Any, Any]:
    """Return (data source, ground truth, extra info)."""
    judged = row.get("reward_model")
    if not isinstance(judged, dict) or "ground_truth" not in judged:
        raise RewardError(f"{name} needs the column reward_model.ground_truth; the row has: {', '.join(row)}")
    return row.get("data_source", ""), judged["ground_truth"], row.get("extra_info")


def _adapt_trl(function: Function, name: str, parameters: Parameters, clock: CallClock) -> GroupReward:
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    needed = [key for key, each in parameters.items() if each.default is each.empty and each.kind not in kinds]

    def score(call: Call) -> Any:
        size, row = len(call.completions), call.row
        chat = isinstance(row["prompt"], list)
        given: dict[str, Any] = {
            key: _for_each(value, size) for key, value in row.items() if takes_any or key in parameters
        }
        given.pop("prompt", None)
        given |= {key: None for key in ABSENT if key in parameters}
        logged = Logged(size)
        theirs = {LOG_EXTRA: logged.extra, LOG_METRIC: logged.metric}
        given |= {key: each for key, each in theirs.items() if takes_any or key in parameters}
        # As in TRL, a conversational prompt gets conversational completions.
        texts = [[{"role": "assistant", "content": text}] if chat else text for text in call.completions]
        given |= {"completions": texts} if takes_any or "completions" in parameters else {}
        given |= {"prompts": _for_each(row["prompt"], size)} if takes_any or "prompts" in parameters else {}
        given |= {key: call.completion_ids for key in IDS if key in parameters}
        if takes_any and call.packed_ids is not None:
            given.setdefault(IDS[0], call.completion_ids)
        missing = [key for key in needed if key not in given]
        if missing:
            raise RewardError(f"{name} needs the column(s) {', '.join(missing)}; the row has: {', '.join(row)}")
        return _score_together(
            lambda: _called(function, given, chat=chat), size, name, clock, applies=True, logged=logged
        )

    return score


class Logged:
    """Numbers that a function of TRL's form logs beside its rewards, per completion of a group of `size`."""

    def __init__(self, size: int) -> None:
        self._parts: list[dict[str, float]] = [{} for _ in range(size)]

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep the numbers of a column; texts, which TRL shows in its table of completions, are left out."""
        for parts, value in zip(self._parts, values, strict=False):
            if isinstance(value, int | float) and math.isfinite(value):
                parts[str(column)] = float(value)

    def metric(self, name: str, value: float) -> None:
        """Keep a number of the whole group, for each of its completions."""
        self.extra(name, [value] * len(self._parts))

    def added_to(self, place: int, outcome: Outcome) -> Outcome:
        if isinstance(outcome, RewardError) or not self._parts[place]:
            return outcome
        return replace(outcome, parts=self._parts[place] | outcome.parts)


def _called(function: Function, given: Mapping[str, Any], *, chat: bool) -> Any:
    try:
        return function(**given)
    except (TypeError, IndexError, KeyError, AttributeError) as error:  # as where it expected the other kind
        kinds = ("messages", "lists of messages") if chat else ("text", "texts")
        raise RewardError(
            f"{failed(error)}. As the row's prompt is {kinds[0]}, `completions` are {kinds[1]}, as in TRL"
        ) from error


def _for_each(value: Any, size: int) -> list[Any]:
    """Copies: a function may modify its arguments, and siblings are scored with the same row."""
    return [deepcopy(value) for _ in range(size)]


def _score_each(call: Callable[[int], Any], size: int, name: str, clock: CallClock) -> Any:
    """Make one call per completion, each with its own deadline; awaitables that they return are awaited together."""
    outcomes: dict[int, Outcome] = {}
    waiting: dict[int, Awaitable[Any]] = {}
    for place in range(size):
        clock.begin(place)
        try:
            returned = call(place)
        except Exception as error:  # user code at a process boundary: its failure is an answer
            outcomes[place] = failed(error)
            continue
        if inspect.isawaitable(returned):
            waiting[place] = returned
        else:
            outcomes[place] = _outcome(returned, name)
    if waiting:
        return _await_all(outcomes, waiting, name, clock)
    return [outcomes[place] for place in range(size)]


async def _await_all(
    outcomes: dict[int, Outcome], waiting: Mapping[int, Awaitable[Any]], name: str, clock: CallClock
) -> list[Outcome]:
    clock.begin(TOGETHER)
    settled = await asyncio.gather(*(await_bounded(each, place, clock) for place, each in waiting.items()))
    for place, (returned, error) in zip(waiting, settled, strict=True):
        outcomes[place] = error or _outcome(returned, name)
    return [outcomes[place] for place in range(len(outcomes))]


def _score_together(
    call: Callable[[], Any],
    size: int,
    name: str,
    clock: CallClock,
    *,
    applies: bool = False,
    logged: Logged | None = None,
) -> Any:
    """Make one call for the group. With `applies`, None in its list means that the function does not apply; what it
    `logged` is added to the parts."""

    def outcomes(returned: Any) -> list[Outcome]:
        if not isinstance(returned, list | tuple) and hasattr(returned, "tolist"):
            returned = returned.tolist()  # an array or a tensor
        if not isinstance(returned, list | tuple) or len(returned) != size:
            raise RewardError(f"{name} must return a list of {size} numbers, got {returned!r:.80}", "no_number")
        found = [NotApplicable(name) if applies and each is None else _outcome(each, name) for each in returned]
        return found if logged is None else [logged.added_to(place, each) for place, each in enumerate(found)]

    async def later(awaitable: Awaitable[Any]) -> list[Outcome]:
        clock.begin(TOGETHER)
        returned, error = await await_bounded(awaitable, TOGETHER, clock)
        if error:
            raise error
        return outcomes(returned)

    clock.begin(WHOLE)
    returned = call()
    return later(returned) if inspect.isawaitable(returned) else outcomes(returned)


async def await_bounded(awaitable: Awaitable[Any], place: int, clock: CallClock) -> tuple[Any, RewardError | None]:
    """Await within the deadline, which starts once there is a slot; returns the result, or why there is none."""
    watched = clock.watch(place, awaitable)
    if clock.slots is None:
        return await _within(watched, clock)
    async with clock.slots:
        return await _within(watched, clock)


async def _within(awaitable: Awaitable[Any], clock: CallClock) -> tuple[Any, RewardError | None]:
    """As `await_bounded`. A call that continues although it was cancelled is abandoned: it costs its own completion,
    and neither its group nor its process waits for it."""
    task = asyncio.ensure_future(_whole(awaitable))
    timed = clock.timeout_s if math.isfinite(clock.timeout_s) else None
    done, _ = await asyncio.wait({task}, timeout=timed)
    if done:
        return task.result()
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_S)
    if not task.done():
        clock.left.add(task)
        task.add_done_callback(clock.left.discard)
    return None, RewardError(f"the call ran longer than reward.timeout_s={clock.timeout_s:g} s", "timed_out")


async def _whole(awaitable: Awaitable[Any]) -> tuple[Any, RewardError | None]:
    try:
        return await awaitable, None
    except Exception as error:  # user code at a process boundary: its failure is an answer
        return None, failed(error)
    except asyncio.CancelledError:  # at its deadline, reported elsewhere; or what it awaited was cancelled
        return None, RewardError("the call was cancelled")


def _outcome(returned: Any, name: str) -> Outcome:
    """Return the outcome of one completion; a failure is that completion's alone."""
    try:
        return to_score(returned, name)
    except Exception as error:  # user code at a process boundary: reading the number may raise
        return failed(error)
