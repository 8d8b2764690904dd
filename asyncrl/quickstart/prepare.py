"""Makes what the quickstart needs: rows of its task, and a base model, once.

Both are cached under `$ASYNCRL_CACHE` (default `~/.cache/asyncrl`) and passed to `asyncrl local` as if they were typed.
`experiment=tools_quickstart`, `python_quickstart` and `search_quickstart` have tasks and models of their own; any other
`experiment=NAME` gets the same paths.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.checks.override_syntax import quoted
from asyncrl.config import load_config
from asyncrl.errors import AsyncRLError
from asyncrl.quickstart.agents import AGENTS, write_rows
from asyncrl.quickstart.modes import LETTERS, REVERSE_SHARE, WORD_LENGTH, write_modes
from asyncrl.quickstart.recipes import AgentRecipe, RewardRecipe, WarmupRecipe
from asyncrl.storage.held import held_folder

WARMUP_TIMEOUT_S = 900.0
REWARD_MODEL = frozenset({"reward=model", "experiment=reward_model"})
"""Arguments that request the quickstart's own reward model, unless `reward.model` names another."""
NAMES_A_RUN = ("run.", "resume=", "overwrite=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task that a recipe trains a model for."""

    write: Callable[..., Any]
    """Writes `train.jsonl` and `heldout.jsonl` into a folder."""
    stamp: tuple[Any, ...]
    """Parameters of the task that are not in the recipe, but affect the model."""


MODES = Task(write=write_modes, stamp=(LETTERS, WORD_LENGTH, REVERSE_SHARE))
AGENT_OF = {"tools_quickstart": "calculator", "python_quickstart": "python", "search_quickstart": "search"}
"""Experiments with their own task -> agent of the task."""


def recipe_of(overrides: Sequence[str]) -> WarmupRecipe:
    """Return the recipe for the task of the chosen experiment."""
    chosen = [text.removeprefix("experiment=") for text in overrides if text.startswith("experiment=")]
    agents = [AGENT_OF[name] for name in chosen if name in AGENT_OF]
    return AgentRecipe(agent=agents[-1]) if agents else WarmupRecipe()


def task_of(recipe: WarmupRecipe) -> Task:
    if not isinstance(recipe, AgentRecipe):
        return MODES
    agent = AGENTS[recipe.agent]
    return Task(write=partial(write_rows, agent), stamp=agent.stamp())


def cache_root() -> Path:
    """Return the folder of all caches.

    Raises:
        AsyncRLError: there is no home folder to keep it in.
    """
    try:
        return Path(os.environ.get("ASYNCRL_CACHE") or "~/.cache/asyncrl").expanduser().absolute()
    except RuntimeError as error:
        raise AsyncRLError(f"the quickstart has no folder for its model: {error}. Set ASYNCRL_CACHE=DIR") from error


def cache_folder(recipe: WarmupRecipe) -> Path:
    """Return the folder of a recipe and task. After a change of either, an old model is not reused.

    Raises:
        AsyncRLError: see `cache_root`.
    """
    text = json.dumps([dataclasses.asdict(recipe), *task_of(recipe).stamp], sort_keys=True)
    return cache_root() / f"quickstart-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def prepare(recipe: WarmupRecipe) -> Path:
    """Return the folder with `model/`, `train.jsonl` and `heldout.jsonl`, created once and renamed into place when
    complete.

    Raises:
        AsyncRLError: the warm-up failed; the message carries its output.
    """
    folder = cache_folder(recipe)
    if folder.is_dir():
        return folder
    with scratch_beside(folder) as made:
        task_of(recipe).write(made, seed=recipe.seed)
        warm_up(made / "model", recipe)
    return folder


@contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `folder` at the end, when it is complete. What killed processes left of theirs
    is removed.

    Raises:
        AsyncRLError: nothing can be written there.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with held_folder(str(folder.parent)) as scratch:
            made = scratch / folder.name
            yield made
            try:
                made.rename(folder)
            except OSError:
                # Another quickstart was faster: same recipe, same content.
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise AsyncRLError(
            f"{folder} cannot be created: {error}. Set ASYNCRL_CACHE=DIR to a folder that can be written"
        ) from error


def prepare_reward_model(folder: Path, recipe: RewardRecipe) -> Path:
    """Return the folder of the reward model for the task and base model in `folder`, created once and renamed into
    place when complete."""
    text = json.dumps(dataclasses.asdict(recipe), sort_keys=True)
    target = folder / f"reward-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    with scratch_beside(target) as made:
        print("training a reward model on right and wrong answers (once, then cached) ...", flush=True)
        make("asyncrl.quickstart.reward_model", str(folder / "model"), str(made), text)
    return target


def warm_up(target: Path, recipe: WarmupRecipe) -> None:
    print("warming up a base model of 149 k parameters (once, then cached) ...", flush=True)
    make("asyncrl.quickstart.base_model", str(target), json.dumps(dataclasses.asdict(recipe)))


def make(module: str, *arguments: str) -> None:
    """Run a module in a separate process: this one never loads torch, so a run with a cached model starts at once."""
    started = time.monotonic()
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WARMUP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise AsyncRLError(
            f"the warm-up did not finish within {WARMUP_TIMEOUT_S:.0f} s: is the machine busy?"
        ) from error
    except OSError as error:  # would be taken for one of the folder
        raise AsyncRLError(f"the warm-up cannot be started: {error}") from error
    if done.returncode:
        raise AsyncRLError(f"the warm-up failed with exit code {done.returncode}:\n{done.stdout[-4000:]}")
    print(f"{done.stdout.strip().splitlines()[-1]} ({time.monotonic() - started:.0f} s)", flush=True)


def quickstart_overrides(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Return the arguments for `asyncrl local`; the user's own settings come last and win.

    The quickstart's own folder, runs/quickstart, is overwritten each time; one that the user named is not.
    """
    wanted = _wants_reward_model(overrides)
    return _settings(folder, prepare_reward_model(folder, RewardRecipe()) if wanted else folder, overrides)


def _wants_reward_model(overrides: Sequence[str]) -> bool:
    named = any(text.startswith("reward.model=") for text in overrides)
    return not named and not REWARD_MODEL.isdisjoint(overrides)


def _settings(folder: Path, reward_model: Path, overrides: Sequence[str]) -> list[str]:
    paths = {"model.path": folder / "model", "data.path": folder / "train.jsonl", "eval.path": folder / "heldout.jsonl"}
    if (corpus := folder / "corpus.jsonl").is_file():
        paths["environment.args.corpus"] = corpus
    if _wants_reward_model(overrides):
        paths["reward.model"] = reward_model
    experiment = [] if any(text.startswith("experiment=") for text in overrides) else ["experiment=quickstart"]
    return [*experiment, *with_paths(paths, overrides)]


def with_paths(paths: Mapping[str, Path], overrides: Sequence[str]) -> list[str]:
    """Return `overrides` after these settings. The folder of the run is overwritten, unless they name one."""
    own = [] if any(text.startswith(NAMES_A_RUN) for text in overrides) else ["overwrite=true"]
    return [*(f"{key}={quoted(str(path))}" for key, path in paths.items()), *own, *overrides]


def prepared(overrides: Sequence[str]) -> Path:
    """The folder of the task. Settings that cannot be are refused before minutes are spent on it."""
    recipe = recipe_of(overrides)
    folder = cache_folder(recipe)
    load_config(_settings(folder, folder, overrides))
    return prepare(recipe)
