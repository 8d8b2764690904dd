"""Fixtures of the integration tests: the real system on a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.quickstart.modes import write_modes
from asyncrl.telemetry.metrics.evaluations import is_evaluation
from asyncrl.utils.process_tree import dying_with_this
from tests.waiting import until

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
VARIED = "def score(completion, row):\n    return float(len(completion) % 2)\n"
"""A reward file that gives a random model different rewards: with equal ones there is no gradient, and a test that
compares weights would show nothing."""
LEISURELY = (
    "import time\n\n\ndef score(completion, row):\n    time.sleep(0.02)\n    return float(len(completion) % 2)\n"
)
"""A reward file for runs that need not be fast. Without its pauses a run takes all cores, and processes started beside
it get none."""


def begun(
    output: Path, command: str, settings: Mapping[str, Any], *, die_with_test: bool = False, **more: Any
) -> subprocess.Popen[str]:
    """Start `asyncrl COMMAND key=value ...`, which writes what it prints into `output`.

    Args:
        more: arguments of Popen; `env` has further variables.
    """
    words = [sys.executable, "-m", "asyncrl.cli", command, *(f"{key}={value}" for key, value in settings.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more.pop("env", {})}
    with output.open("a") as sink:
        return subprocess.Popen(
            dying_with_this(words) if die_with_test else words,
            stdout=sink, stderr=subprocess.STDOUT, text=True, env=environment, **more,
        )  # fmt: skip


@dataclass
class LocalRun:
    """One `asyncrl local` process tree. `stop` ends everything it started."""

    directory: Path
    process: subprocess.Popen[str]
    output: Path
    seen: set[psutil.Process] = field(default_factory=set)
    """The processes seen so far. Pids alone may be reused before a long run ends, and strangers would be killed."""

    def rows(self, name: str = "metrics") -> list[dict[str, Any]]:
        """Return the rows of a file of the run folder; of the metrics only those of trained steps."""
        return [row for row in self._rows(name) if name != "metrics" or not is_evaluation(row)]

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the metrics' rows of evaluations, in the order in which they were written."""
        return [row for row in self._rows("metrics") if is_evaluation(row)]

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a file, without a last line that is still being written."""
        path = self.directory / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def descendants(self, matching: str = "") -> list[psutil.Process]:
        try:
            processes = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen.update(processes)
        found = []
        for process in processes:
            try:
                if matching in " ".join(process.cmdline()):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def wait_for_step(self, step: int, timeout_s: float) -> None:
        """Wait until the metrics show `step`."""
        self.until(lambda: any(row["step"] >= step for row in self.rows()), f"step {step} was not reached", timeout_s)

    def until(self, happened: Callable[[], object], otherwise: str, within_s: float = 240.0) -> None:
        """Wait until `happened()`. The test fails at the deadline, or if the run ends before."""

        def lives() -> bool:
            self.descendants()
            time.sleep(0.2)  # each look reads all processes of the machine, and most conditions all rows
            return self.process.poll() is None

        until(happened, lambda: f"{otherwise} ({self.process.poll()}):\n{self.tail()}", within_s=within_s, holds=lives)

    def kill(self, matching: str, before: Collection[int] = ()) -> int:
        """Kill -9 the process of this command line that is not among those killed `before`. Returns its pid."""
        found: list[psutil.Process] = []

        def there() -> bool:
            found[:] = [each for each in self.descendants(matching) if each.pid not in before]
            return bool(found)

        self.until(there, f"{matching} is not running")
        os.kill(found[0].pid, signal.SIGKILL)
        return found[0].pid

    def finish(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {timeout_s} s:\n{self.tail()}")

    def tail(self) -> str:
        logs = [self.output, *sorted((self.directory / "logs").glob("*.log"))]
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs if path.exists()
        )

    def stop(self) -> None:
        self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for process in self.seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # psutil checks that the pid still belongs to the same process


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Config overrides for a random Qwen2 with the byte tokenizer and the quickstart's data."""
    root = tmp_path_factory.mktemp("task")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=264,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            pad_token_id=256,
            bos_token_id=257,
            eos_token_id=258,
        )
    )
    model.save_pretrained(root / "model")
    save_byte_tokenizer(root / "model")
    train, _ = write_modes(root, seed=0, train_rows=512, eval_rows=64)
    (root / "varied.py").write_text(VARIED)
    return {
        "model.path": str(root / "model"),
        "data.path": str(train),
        "reward.function": f"{root / 'varied.py'}:score",
        "data.max_prompt_tokens": "32",
        "rollout.max_new_tokens": "12",
        "rollout.group_size": "4",
        "learner.groups_per_step": "8",
        "learner.max_tokens_per_microbatch": "512",
        "learner.lr": "1e-3",
    }


@pytest.fixture
def chat_model(tiny_task: dict[str, str], tmp_path: Path) -> Path:
    model = tmp_path / "model"
    shutil.copytree(tiny_task["model.path"], model)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return model


StartLocal = Callable[..., LocalRun]


@pytest.fixture
def start_local(tiny_task: dict[str, str], tmp_path: Path) -> Iterator[StartLocal]:
    """`start_local({"learner.steps": 5, ...})` runs `asyncrl local` in `tmp_path/run`, and cleans up after the test.

    With an experiment or any setting of `eval` it evaluates the task's held-out rows, unless `eval.path` is given.
    """
    runs: list[LocalRun] = []

    def start(overrides: dict[str, Any]) -> LocalRun:
        directory = tmp_path / "run"
        settings = {**tiny_task, "run.dir": str(directory), **{key: str(value) for key, value in overrides.items()}}
        if "experiment" in overrides or any(key.startswith("eval.") for key in overrides):
            settings.setdefault("eval.path", str(Path(tiny_task["data.path"]).with_name("heldout.jsonl")))
        output = tmp_path / f"local-{len(runs)}.log"
        run = LocalRun(directory, begun(output, "local", settings), output)
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.stop()
