"""`asyncrl sft` as a user runs it: it learns the quickstart's task from conversations, is killed, resumed and gone on
from."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from asyncrl.cli.main import main
from asyncrl.quickstart.base_model import build_model
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.quickstart.modes import write_modes
from asyncrl.quickstart.recipes import WarmupRecipe
from tests.integration.conftest import begun
from tests.sft.given import write
from tests.waiting import until

PATIENCE_S = 300.0
STEPS = 160


def task(folder: Path) -> None:
    """A model that knows nothing, `talks.jsonl` and `held.jsonl` to learn from and be measured by, and `prompts.jsonl`
    for reinforcement learning."""
    torch.manual_seed(0)
    build_model(WarmupRecipe()).save_pretrained(folder / "model")
    save_byte_tokenizer(folder / "model")
    train, held = write_modes(folder / "rows", seed=0, eval_rows=64)
    for source, target in ((train, "talks"), (held, "held")):
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        talks = [
            {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]}
            for row in rows
        ]
        write(folder / f"{target}.jsonl", talks)
        prompts = [
            {"prompt": talk["messages"][:1], "answer": row["answer"]} for talk, row in zip(talks, rows, strict=True)
        ]
        write(folder / f"{target}_prompts.jsonl", prompts)


def rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def start(folder: Path, **more: str) -> subprocess.Popen[str]:
    settings = {
        **{"model.path": folder / "model", "data.path": folder / "talks.jsonl", "eval.path": folder / "held.jsonl"},
        **{"data.max_tokens": 64, "learner.lr": 3e-3, "learner.rows_per_step": 64, "learner.steps": STEPS},
        **{"learner.warmup_steps": 5, "learner.save_every": 20, "eval.every": 80, "run.dir": folder / "run"},
    }
    return begun(folder / "said.txt", "sft", settings | more)


def said(folder: Path) -> str:
    return (folder / "said.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_learns_is_killed_resumed_and_gone_on_from(tmp_path: Path) -> None:
    task(tmp_path)
    process = start(tmp_path)
    latest = tmp_path / "run" / "ckpt" / "latest"
    until(
        lambda: max((row["step"] for row in rows(tmp_path)), default=0) >= 25 and latest.exists(),
        lambda: said(tmp_path),
        within_s=PATIENCE_S,
        holds=lambda: process.poll() is None,
    )
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive, "torchrun or a rank outlived the command"
    saved = int(latest.resolve().name.removeprefix("step_"))
    assert saved in range(20, STEPS, 20)

    resumed = start(tmp_path, **{"resume": "auto", "model.compile": "true"})
    assert resumed.wait(timeout=2 * PATIENCE_S) == 0, said(tmp_path)  # compiling takes minutes on busy cores
    trained = [row for row in rows(tmp_path) if "loss/total" in row]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1)), "a step is missing, or there twice"
    assert f"resumed from step {saved}\n" in said(tmp_path)
    assert (
        f"the layers of model.path={tmp_path / 'model'} were compiled in "
        in (tmp_path / "run" / "logs" / "learner.log").read_text()
    )
    held = {row["step"]: row for row in rows(tmp_path) if "eval/heldout/loss" in row}
    assert trained[-1]["loss/total"] < 0.3 < 3 < trained[0]["loss/total"]
    assert held[0]["eval/heldout/token_accuracy"] < 0.1 and held[STEPS]["eval/heldout/token_accuracy"] > 0.9
    assert held[STEPS]["eval/heldout/loss"] < held[80]["eval/heldout/loss"] < held[0]["eval/heldout/loss"]

    # What it exported samples the answers with the end it was taught, and reinforcement learning begins with it.
    asked = [f"data.path={tmp_path / 'held_prompts.jsonl'}", "reward=exact_match", "engine=transformers"]
    asked += ["rollout.max_new_tokens=16", "data.max_prompt_tokens=32"]
    assert main(["eval", str(tmp_path / "run"), *asked, f"run.dir={tmp_path / 'evaluated'}"]) == 0
    sampled = [json.loads(line) for line in (tmp_path / "evaluated" / "samples.jsonl").read_text().splitlines()]
    assert len(sampled) == 64, sorted(path.name for path in (tmp_path / "evaluated").iterdir())
    assert {each["finish_reason"] for each in sampled} == {"stop"}, "nothing taught it to stop"
    assert sum(each["reward"] for each in sampled) > 48
    assert main(["local", f"model.path={tmp_path / 'run' / 'hf'}", *asked, "--dry-run"]) == 0
