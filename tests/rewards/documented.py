"""Reward functions in the forms that the documentation of verl and TRL shows, as users would bring them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable

# verl: "Implement Reward Function for Dataset", and its examples of custom_reward_function with reward_kwargs


def my_reward_fn(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 100


def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.1, **kwargs):
    found = re.search(r"#### (-?[0-9.,]+)", solution_str)
    if found is None:
        return {"score": 0.0, "acc": False, "pred": None}
    right = found.group(1) == ground_truth
    return {"score": 1.0 if right else format_score, "acc": right, "pred": found.group(1)}


def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    return [
        scale * float(solution.strip().endswith(truth))
        for solution, truth, _ in zip(solution_strs, ground_truths, extra_infos, strict=True)
    ]


# TRL: "Using a custom reward function" of the GRPO trainer


def longer_by_tokens(completion_ids, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]


def longer_by_tokens_as_once_spelt(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]


def longer(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def think_then_answer(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


def boxed(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if m and m.group(1) == gt else 0.0 for m, gt in zip(found, ground_truth, strict=True)]


def only_math(prompts, completions, task, **kwargs):
    return [1.0 if each == "math" else None for each in task]


def only_code(prompts, completions, task, **kwargs):
    return [-1.0 if each == "code" else None for each in task]


async def slowly_judged(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


def by_the_state(completions, trainer_state, **kwargs):
    return [0.0 if trainer_state is None else trainer_state.global_step for _ in completions]


def logging_beside(completions, log_extra, log_metric, **kwargs):
    log_extra("length", [len(text) for text in completions])
    log_extra("first", [text[:1] for text in completions])
    log_metric("share", 0.25)
    return [1.0 for _ in completions]


def logging_by_keyword(completions, **kwargs):
    kwargs["log_metric"]("share", 0.5)
    return [1.0 for _ in completions]


def with_a_loop_of_its_own(completion, row):
    async def later():
        await asyncio.sleep(0.001)
        return 1.0

    if row.get("closes"):
        return asyncio.run(later())
    return asyncio.get_event_loop().run_until_complete(later())


# ours


def with_ids(completion, row, completion_ids, finish_reason, bonus=0.0):
    return {"score": len(completion_ids) + bonus, "cut": float(finish_reason == "length")}


async def in_a_while(completion, row, seconds=0.2):
    await asyncio.sleep(seconds)
    return 1.0


def in_turn(completion, row):
    """A synchronous function may run an event loop of its own."""
    return asyncio.run(in_a_while(completion, row, seconds=0.0))


class Scaled:
    def __init__(self, scale, offset=0.0):
        self.scale, self.offset = scale, offset

    def __call__(self, completion, row):
        return self.scale * len(completion) + self.offset


def get_longer_than(shortest: int = 3, least: float = 0.0) -> Callable:
    """As TRL's `get_soft_overlong_punishment`: it makes the reward."""

    def longer(completions, **kwargs):
        return [1.0 if len(each) > shortest else least for each in completions]

    return longer


def get_word(word="yes"):
    return lambda completion, row: float(word in completion)


def get_number(number=1.0):
    return number


def breaks(completion, row):
    return json.loads("1") + int(completion)
