"""Generated rows with the columns of the recipes' datasets, used as training data by `experiment=smoke/NAME`.

Every right answer is a small number, because the smoke model (`asyncrl.quickstart.smoke_models`) says only those.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.errors import AsyncRLError, ConfigError

ANSWERS = (1, 2, 3)
TRAIN_ROWS, HELDOUT_ROWS = 64, 16
MAKE_S = 300.0
Row = dict[str, Any]


def write_gsm8k(folder: Path) -> None:
    """Write `train.parquet` and `test.parquet` in the format of verl's preprocessing of GSM8K."""
    for split, count in (("train", TRAIN_ROWS), ("test", HELDOUT_ROWS)):
        rows = [gsm8k_row(problem, answer, split, i) for i, (problem, answer) in enumerate(problems(count, split))]
        write_parquet(folder / f"{split}.parquet", rows)


def gsm8k_row(problem: str, answer: int, split: str, index: int) -> Row:
    ask = 'Let\'s think step by step and output the final answer after "####".'
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{problem} {ask}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index, "answer": f"#### {answer}", "question": problem},
    }


def write_dapo_math(folder: Path) -> None:
    """Write `train.parquet` and `aime24.parquet` with the columns of DAPO-Math-17k and AIME-2024 (DAPO's version)."""
    for split, count in (("train", TRAIN_ROWS), ("aime24", HELDOUT_ROWS)):
        rows = [dapo_math_row(problem, answer, i) for i, (problem, answer) in enumerate(problems(count, split))]
        write_parquet(folder / f"{split}.parquet", rows)


def dapo_math_row(problem: str, answer: int, index: int) -> Row:
    ask = "Solve the problem step by step. The last line is of the form Answer: $Answer."
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{ask}\n\n{problem}"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(answer), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"smoke-{index}"},
    }


def write_search(folder: Path) -> None:
    """Write `train.parquet` and `test.parquet` with the columns of Search-R1's rows, and a `corpus.jsonl` to search."""
    for split, count in (("train", TRAIN_ROWS), ("test", HELDOUT_ROWS)):
        rows = [search_row(problem, answer, split, i) for i, (problem, answer) in enumerate(problems(count, split))]
        write_parquet(folder / f"{split}.parquet", rows)
    passages = ({"id": str(n), "contents": f'"Number {n}"\n{n} is less than {n + 1}.'} for n in range(10))
    (folder / "corpus.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in passages))


def search_row(problem: str, answer: int, split: str, index: int) -> Row:
    return {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Search, then answer. {problem}"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [str(answer)]}},
        "extra_info": {"split": split, "index": index},
    }


NUMBERS_V1 = '''"""A taskset of verifiers: the answer is the first number of the last reply."""

import re

import verifiers.v1 as vf

__all__ = ["NumbersTaskset"]


class NumbersData(vf.TaskData):
    answer: int


class NumbersTask(vf.Task[NumbersData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.away(trace) == 0)

    @vf.reward(weight=0.1)
    async def near(self, trace: vf.Trace) -> float:
        return 1.0 / (1 + self.away(trace))

    @vf.reward(weight=0.1)
    async def low(self, trace: vf.Trace) -> float:  # or a pair that is wrong by the same would teach nothing
        return float("0." + "".join(re.findall(r"[0-9]", trace.last_reply or "")) + "0")

    def away(self, trace: vf.Trace) -> int:
        said = re.search(r"\\d{1,6}", trace.last_reply or "")
        return 10**6 if said is None else abs(int(said.group()) - self.data.answer)


class NumbersTaskset(vf.Taskset[NumbersTask, vf.TasksetConfig]):
    def load(self) -> list[NumbersTask]:
        return [NumbersTask(NumbersData(prompt=f"Say {n}.", answer=n), self.config.task) for n in (1, 2, 3)]
'''


def write_verifiers(folder: Path) -> None:
    """Write `tasksets/` with the package of a taskset, and `train.jsonl` and `test.jsonl` with its tasks."""
    package = folder / "tasksets" / "numbers_v1"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(NUMBERS_V1)
    for split, count in (("train", TRAIN_ROWS), ("test", HELDOUT_ROWS)):
        rows = (
            {"prompt": [{"role": "user", "content": problem}], "verifiers": {"prompt": problem, "answer": answer}}
            for problem, answer in problems(count, split)
        )
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_chat_prompts(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl` with chat messages only, the usual form of prompts for a reward model."""
    for split, count in (("train", TRAIN_ROWS), ("test", HELDOUT_ROWS)):
        rows = ({"prompt": [{"role": "user", "content": problem}]} for problem, _ in problems(count, split))
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


REASONING_TASKS = ("chain_sum", "letter_counting", "spell_backward")


def write_reasoning(folder: Path) -> None:
    """Write `TASK.jsonl` for each task and `heldout.jsonl` for all, generated by the package in a separate process.

    Raises:
        AsyncRLError: the package is missing, or generating the rows failed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("experiment=smoke/reasoning_gym_mix needs reasoning-gym: pip install 'asyncrl[gym]'")
    for name, tasks, seed in (*((task, (task,), 0) for task in REASONING_TASKS), ("heldout", REASONING_TASKS, 1)):
        command = [sys.executable, "-m", "asyncrl.environments.reasoning.rows", *tasks, f"--seed={seed}", "--size=24"]
        with (folder / f"{name}.jsonl").open("wb") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=MAKE_S, check=False)
        if done.returncode:
            raise AsyncRLError(f"rows of {', '.join(tasks)} cannot be made: {done.stderr.decode()[-2000:]}")


def problems(count: int, seed: str) -> Iterator[tuple[str, int]]:
    """Yield `(question, answer)`, where the answer is one of ANSWERS."""
    rng = random.Random(f"smoke-{seed}")
    for _ in range(count):
        answer, bought = rng.choice(ANSWERS), rng.randrange(2, 60)
        name, thing = rng.choice(("Tom", "Ada", "Lin", "Noor")), rng.choice(("apples", "pens", "coins"))
        yield f"{name} has {bought} {thing} and gives {bought - answer} away. How many are left?", answer


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
