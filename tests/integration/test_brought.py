"""What someone brings from verl and from TRL trains here as it is: parquet of verl's preprocess scripts with its
`compute_score`, and a dataset of TRL with its reward functions and their weights."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from datasets import Dataset

from tests.integration.conftest import StartLocal

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(900)]

MATH = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    start = solution_str.rfind("\\\\boxed{")
    answer = None if start < 0 else solution_str[start + 7 : solution_str.find("}", start)]
    correct = answer == ground_truth
    near = 0.5 * (len(solution_str) % 2) if extra_info["split"] == "train" else 0.0
    return {"score": 1.0 if correct else near, "acc": correct, "pred": answer or "[INVALID]"}
"""
TRL = """
import asyncio
import re


def format_reward(completions, **kwargs):
    return [1.0 if re.search("[a-m]", completion[0]["content"]) else 0.0 for completion in completions]


def math_only(prompts, completions, task, **kwargs):
    return [float(len(c[0]["content"]) % 3) if t == "math" else None for c, t in zip(completions, task)]


async def judge(prompts, completions, completion_ids, **kwargs):
    await asyncio.sleep(0.01)
    return [len(ids) / 16 for ids in completion_ids]
"""


def verl_rows(split: str, count: int) -> list[dict[str, Any]]:
    """As `math_dataset.py` of verl writes them."""
    return [
        {
            "data_source": MATH,
            "prompt": [{"role": "user", "content": f"What is ${n} + 1$? {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": split, "index": n},
        }
        for n in range(count)
    ]


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_rows_and_rewards_of_verl_and_of_trl_train_as_they_are(
    start_local: StartLocal, chat_model: Path, tmp_path: Path
) -> None:
    for split, count in (("train", 32), ("test", 8)):
        Dataset.from_list(verl_rows(split, count)).to_parquet(tmp_path / f"{split}.parquet")
    conversations = [
        {"prompt": [{"role": "user", "content": f"solve {n}"}], "task": "math" if n % 2 else "code"} for n in range(32)
    ]
    Dataset.from_list(conversations).save_to_disk(tmp_path / "trl")
    (tmp_path / "verl_reward.py").write_text(VERL)
    (tmp_path / "trl_rewards.py").write_text(TRL)
    run = start_local(
        {
            "model.path": chat_model,
            "model.renderer": "default",
            "data.path": "",
            "data.mixture.maths.path": tmp_path / "train.parquet",
            "data.mixture.talk.path": tmp_path / "trl",
            "eval.path": tmp_path / "test.parquet",
            "data.max_prompt_tokens": 160,
            "reward.function": "",
            "reward.functions": (
                f"{{verl: {{function: '{tmp_path}/verl_reward.py:compute_score', data_source: {MATH}}}, "
                f"form: {{function: '{tmp_path}/trl_rewards.py:format_reward', data_source: talk}}, "
                f"maths: {{function: '{tmp_path}/trl_rewards.py:math_only', data_source: talk, weight: 0.5}}, "
                f"judge: {{function: '{tmp_path}/trl_rewards.py:judge', data_source: talk, weight: 2}}}}"
            ),
            "telemetry.samples_per_step": 32,
            "learner.steps": 2,
            "rollout.host": "process",
        }
    )
    assert run.finish(800) == 0, run.tail()
    verl, trl = (module_of(tmp_path / name) for name in ("verl_reward.py", "trl_rewards.py"))
    samples = run.rows("samples")
    measured = run.rows()
    assert len(samples) == 2 * 32 and [row["step"] for row in measured] == [1, 2]
    assert {"rewards/verl/acc", "rewards/form", "rewards/judge"} <= {name for row in measured for name in row}
    for row in samples:
        text, parts = row["completion"], row["rewards"]
        if row["source"] == "maths":
            expected = verl.compute_score(MATH, text, "never", {"split": "train"})
            assert row["reward"] == expected["score"] and parts["verl/acc"] == 0.0
            continue
        said = [[{"role": "assistant", "content": text}]]
        (form,) = trl.format_reward(said)
        odd = int(row["prompt"].split("solve ")[1].split("<")[0]) % 2
        (maths,) = trl.math_only([], said, ["math" if odd else "code"])
        assert parts["form"] == form and ("maths" in parts) == bool(odd) and parts.get("maths") == maths
        assert row["reward"] == pytest.approx(form + 0.5 * (maths or 0.0) + 2 * parts["judge"])
        assert parts["judge"] in [asyncio.run(trl.judge([], [], [range(n)]))[0] for n in range(1, 13)]
    held_out = run.rows("eval_samples")
    assert {row["row"] for row in held_out} == set(range(8)) and {row["data_source"] for row in held_out} == {MATH}
    assert all(row["reward"] == 0.0 for row in held_out)
