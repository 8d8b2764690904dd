"""`asyncrl eval MODEL|RUN [data.path=FILE reward.function=... key=value ...]`: evaluates a model on a dataset.

There is no replay server and no learner: this process owns the engine. Results are written to a folder, row by row; the
same command continues where it was interrupted.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.checks.dtypes import AUTO, with_dtypes
from asyncrl.checks.evaluations import EvalSet, eval_sets
from asyncrl.checks.machine import check_machine
from asyncrl.checks.override_syntax import quoted
from asyncrl.checks.placement import visible_gpus
from asyncrl.checks.servers import SERVERS
from asyncrl.cli.arguments.settings_file import with_files
from asyncrl.cli.starting.preflight import look_ahead
from asyncrl.config import load_config
from asyncrl.data.dataset import open_dataset
from asyncrl.environments.probe import check_environment
from asyncrl.errors import AsyncRLError, CheckpointError, ConfigError
from asyncrl.evaluation.intervals import CONFIDENCE
from asyncrl.evaluator.folder import EvalFolder, opened
from asyncrl.evaluator.identity import digest, identity
from asyncrl.evaluator.results import failure_lines, results, table_of, text_of
from asyncrl.schema import Config
from asyncrl.storage.checkpoints import EXPORT_DIR
from asyncrl.telemetry.folder.resumed import CONFIG_FILE, is_supervised

SEES_A_GPU = "import torch; print(torch.cuda.is_available())"
TORCH_S = 300.0
"""Timeout in seconds for a process to load torch, possibly from a slow disk."""
RUNS = "runs"
CHOOSES_A_FOLDER = ("run.name=", "run.dir=")
CHOOSES_ROWS = "data.path="
WHOLE = ("rollout.top_p=1.0", "rollout.top_k=0", "rollout.min_p=0.0")
"""Overrides of a run's settings: rows are sampled by `eval.*`, also with an engine that does not support truncation in
training."""
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_NOTHING = 1
"""Exit code if no sample has a score."""


def main(path: str, overrides: Sequence[str], *, dry_run: bool = False) -> int:
    """Run the evaluation. Exit code: 0, 1 if no sample has a score, 128 + a signal's number if stopped by one.

    Raises:
        ConfigError, DataError: a setting, this machine or the data was refused. RunFolderError: the folder is refused.
    """
    config, limited = prepared(path, overrides)
    # The dtype is part of the evaluation's identity.
    config = with_dtypes(config, engine=engine_kind(config))
    check_machine(config, "rollout")
    check_environment(config.environment, overlong=config.data.overlong)
    rows = _rows_of(config, limited)
    made_of = identity(config, rows)
    folder = folder_of(config, made_of, overrides)
    print(
        f"{config.model.path} on {config.data.path}: {rows:,} rows, {config.eval.samples} sample(s) of each", flush=True
    )
    print(f"folder: {folder}", flush=True)
    if dry_run:
        seen = look_ahead(config)
        print("\n".join([*seen.prompts, *seen.reward, "dry run: nothing was started"]))
        return 0
    with opened(folder, made_of, samples=config.eval.samples, overwrite=config.overwrite) as kept:
        again = shlex.join(
            ["asyncrl", "eval", path, *(text for text in overrides if not text.startswith("overwrite="))]
        )
        code = _make_missing(config, kept, rows, again)
        if code:
            return code
        return _tell(config, kept, made_of)


def engine_kind(config: Config) -> str:
    """Return `cuda` or `cpu`, on which the engine will compute, if `engine.dtype=auto` depends on it. Torch is asked in
    a separate process, since a build without CUDA does not see the machine's GPUs.

    Raises:
        ConfigError: torch gives no answer.
    """
    if config.engine.dtype != AUTO or config.engine.device == "cpu" or visible_gpus() == ():
        return "cpu"
    try:
        asked = subprocess.run([sys.executable, "-c", SEES_A_GPU], capture_output=True, text=True, timeout=TORCH_S)
    except subprocess.TimeoutExpired:
        why = f"no answer in {TORCH_S:.0f} s"
    else:
        if asked.stdout.strip() in ("True", "False"):
            return "cuda" if asked.stdout.strip() == "True" else "cpu"
        why = next(iter(asked.stderr.strip().splitlines()[-1:]), f"exit code {asked.returncode}")
    raise ConfigError(f"engine.dtype=auto: torch did not report whether it sees a GPU ({why}). Set engine.dtype")


def prepared(path: str, overrides: Sequence[str]) -> tuple[Config, bool]:
    """Return the settings, based on the run's if `path` is a run, with the evaluated rows as `data.path`; and whether
    only the first `eval.rows` of them are evaluated.

    Raises:
        ConfigError: a setting was refused. CheckpointError: the run has no model to evaluate yet.
    """
    run = Path(path)
    recorded = (run / CONFIG_FILE).is_file() and not is_supervised(run)
    own = [str(run / CONFIG_FILE), *WHOLE] if recorded else []
    chosen = [] if _chooses(overrides) else ["run.name=eval"]
    given = with_files([*own, *overrides, *chosen, f"model.path={quoted(str(_model_of(run)))}"])
    config = load_config(given)
    if config.engine.name in SERVERS:
        raise ConfigError(
            "an evaluation loads the weights of its folder into an engine of its own, so it cannot use servers that "
            "you started. Use engine=transformers or engine=vllm; for a run with servers also set engine.urls=[] "
            "engine.key_env="
        )
    config.model = replace(config.model, lora_rank=0)  # a whole model is evaluated
    # Ray is not started here; below, rows are taken in the order of the file.
    config.reward = replace(config.reward, host="worker", gpus=0.0)
    typed = any(text.startswith(CHOOSES_ROWS) for text in overrides)
    found = None if typed else chosen_set(config)
    if found is None and not config.data.path:
        raise ConfigError(
            "data.mixture cannot be evaluated, because a mixture has no fixed order. Evaluate its sources one at a "
            "time: data.path=FILE"
        )
    if found is None:
        config.data = replace(config.data, mixture={}, order_by="", shuffle=False)
        tokens = config.eval.max_new_tokens or config.rollout.max_new_tokens
        config.rollout = replace(config.rollout, max_new_tokens=tokens)
    else:
        config = found.config
    config.eval = replace(config.eval, path="", sets={})
    return config, any(text.startswith("eval.rows=") for text in given)


def chosen_set(config: Config) -> EvalSet | None:
    """Return the set that `eval.name` names, or the only one; None if there is none.

    Raises:
        ConfigError: there are several, and none is chosen.
    """
    sets = eval_sets(config)
    named = [each for each in sets if each.name == config.eval.name]
    if not named and len(sets) > 1:
        names = ", ".join(each.name for each in sets)
        raise ConfigError(
            f"the run has several evaluation sets ({names}), and one is evaluated at a time. Choose it with "
            "eval.name=NAME"
        )
    return next(iter(named or sets), None)


def _model_of(given: Path) -> Path:
    """Return the folder of the model; for a run, that of its exported model."""
    if not (given / CONFIG_FILE).is_file():
        return given
    if not (given / EXPORT_DIR).is_dir():
        raise CheckpointError(
            f"{given} is a run that has exported no model yet ({EXPORT_DIR}/ comes with its last step). Finish it with "
            "resume=auto, or give the folder of a Hugging Face model"
        )
    return given / EXPORT_DIR


def _rows_of(config: Config, limited: bool) -> int:
    rows = open_dataset(config.data)
    try:
        return min(len(rows), config.eval.rows) if limited else len(rows)
    finally:
        rows.close()


def _chooses(overrides: Sequence[str]) -> bool:
    return any(text.startswith(CHOOSES_A_FOLDER) for text in overrides)


def folder_of(config: Config, made_of: dict[str, object], overrides: Sequence[str]) -> Path:
    """Return `run.dir` if it was chosen; otherwise a separate folder for each model, dataset and settings."""
    if _chooses(overrides):
        return Path(config.run.dir).resolve()
    model = Path(config.model.path)
    name = model.parent.name if model.name == EXPORT_DIR else model.name
    rows = config.data.path
    parts = [name, Path(rows if isinstance(rows, str) else rows[0]).stem, digest(made_of)]
    return Path(RUNS, "-".join(["eval", *(re.sub(r"[^A-Za-z0-9._]+", "_", part)[:40] for part in parts)])).resolve()


def _make_missing(config: Config, kept: EvalFolder, rows: int, again: str) -> int:
    """Evaluate the missing rows. Returns the exit code; 0 if no row is missing any more."""
    todo = kept.missing()
    if not todo:
        return 0
    if kept.done:
        print(f"continues: {rows - len(todo):,} of {rows:,} rows are done", flush=True)
    seen = look_ahead(config)
    print("\n".join([*seen.prompts, *seen.reward]), flush=True)
    try:
        # Imported here by name: it loads torch, which the table of a finished evaluation does not need.
        run_rows = importlib.import_module("asyncrl.evaluator.run").run_rows
        run_rows(config, todo, kept, lambda line: print(line, flush=True))
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        _say_how_to_go_on(kept, rows, again, "stopped")
        return EXIT_INTERRUPTED if isinstance(stop, KeyboardInterrupt) else EXIT_TERMINATED
    except AsyncRLError:
        _say_how_to_go_on(kept, rows, again, "ended")
        raise
    return 0


def _say_how_to_go_on(kept: EvalFolder, rows: int, again: str, what: str) -> None:
    print(f"{what}; {rows - len(kept.missing()):,} of {rows:,} rows are done. Continue with:\n  {again}", flush=True)


def _tell(config: Config, kept: EvalFolder, made_of: dict[str, object]) -> int:
    table = table_of(config, kept.done)
    path = kept.write_results(results(config, made_of, table, kept.done))
    print("\n".join(["", *text_of(table, config.eval.samples)]))
    print(f"in brackets: {CONFIDENCE:.0%} intervals over rows; every figure is in {path}")
    for line in failure_lines(kept.done):
        print(line)
    if any(sample.failed for samples in kept.done.values() for sample in samples):
        print("The same command tries the failed rows again")
    return 0 if table[-1].samples else EXIT_NOTHING
