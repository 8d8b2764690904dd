"""`experiment=smoke/NAME`: the recipe `experiment=NAME`, with a model and rows that a CPU processes in seconds.

`configs/experiment/smoke/NAME.yaml` makes the recipe small, through Hydra alone. Its models and rows are made here,
once, cached under `$ASYNCRL_CACHE` (default `~/.cache/asyncrl`), and passed as if they were typed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.quickstart import smoke_rows
from asyncrl.quickstart.prepare import cache_root, make, scratch_beside, with_paths

CHOSEN = "experiment=smoke/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """The rows and models for a smoke run of a recipe."""

    write: Callable[[Path], None]
    """Writes files of rows into a folder."""
    files: Mapping[str, str]
    """Settings -> files of rows, `data.path` first."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Settings -> model folders of `smoke_models`. `model.path` is `model` by default."""


TRAIN_AND_TEST = {"data.path": "train.parquet", "eval.path": "test.parquet"}
SMOKES: dict[str, Ingredients] = {
    "gsm8k_grpo": Ingredients(write=smoke_rows.write_gsm8k, files=TRAIN_AND_TEST),
    "gsm8k_ppo_critic": Ingredients(write=smoke_rows.write_gsm8k, files=TRAIN_AND_TEST),
    "dapo_math_17k": Ingredients(
        write=smoke_rows.write_dapo_math,
        files={"data.path": "train.parquet", "eval.sets.aime24.path": "aime24.parquet"},
    ),
    "rlhf_reward_model": Ingredients(
        write=smoke_rows.write_chat_prompts,
        files={"data.path": "train.jsonl", "eval.path": "test.jsonl"},
        models={"reward.model": "classifier"},
    ),
    "reasoning_gym_mix": Ingredients(
        write=smoke_rows.write_reasoning,
        files={
            **{f"data.mixture.{task}.path": f"{task}.jsonl" for task in smoke_rows.REASONING_TASKS},
            "eval.path": "heldout.jsonl",
        },
    ),
    "verifiers": Ingredients(
        write=smoke_rows.write_verifiers,
        files={"data.path": "train.jsonl", "eval.path": "test.jsonl", "environment.args.path": "tasksets"},
    ),
    "on_policy_distillation": Ingredients(
        write=smoke_rows.write_gsm8k,
        files={"data.path": "train.parquet", "eval.sets.gsm8k.path": "test.parquet"},
        models={"reference.path": "teacher"},
    ),
    "search_r1": Ingredients(
        write=smoke_rows.write_search,
        files={**TRAIN_AND_TEST, "environment.args.corpus": "corpus.jsonl"},
        models={"model.path": "caller"},
    ),
    "retool": Ingredients(
        write=smoke_rows.write_dapo_math,
        files={"data.path": "train.parquet", "eval.sets.aime24.path": "aime24.parquet"},
        models={"model.path": "caller"},
    ),
}
"""Ingredients by the name of the recipe."""


def filled(overrides: Sequence[str]) -> list[str]:
    """Return `overrides`, with models and rows if a smoke variant is chosen; the user's own settings come last and win.

    Raises:
        AsyncRLError: models or rows cannot be made.
    """
    name = next((text.removeprefix(CHOSEN) for text in overrides if text.startswith(CHOSEN)), "")
    if name not in SMOKES:
        return list(overrides)  # an unknown variant is refused when the settings are composed
    needed = SMOKES[name]
    models, rows = prepared_models(), prepared_rows(name, needed)
    paths = {key: models / folder for key, folder in {"model.path": "model", **needed.models}.items()}
    paths |= {key: rows / file for key, file in needed.files.items()}
    return with_paths(paths, overrides)


def prepared_models() -> Path:
    """Return the folder of all smoke models, which are made if necessary."""
    folder = cache_root() / f"smoke-models-{_stamp(MODEL_SOURCES)}"
    if not folder.is_dir():
        with scratch_beside(folder) as made:
            print(
                "training the models of the smoke variants, 149 k parameters each: minutes, once, then cached ...",
                flush=True,
            )
            make("asyncrl.quickstart.smoke_models", str(made))
    return folder


def prepared_rows(name: str, needed: Ingredients) -> Path:
    """Return the folder with the files of rows, which are made if necessary."""
    folder = cache_root() / f"smoke-{name}-{_stamp(ROW_SOURCES)}"
    if not folder.is_dir():
        with scratch_beside(folder) as made:
            made.mkdir()
            needed.write(made)
    return folder


ROW_SOURCES = ("quickstart/smoke_rows.py", "environments/reasoning/rows.py")
MODEL_SOURCES = (
    "quickstart/smoke_models.py",
    "quickstart/base_model.py",
    "quickstart/recipes.py",
    "quickstart/byte_tokenizer.py",
)
"""Files of the package that determine the models, as those of `ROW_SOURCES` determine the rows."""


def _stamp(sources: Sequence[str]) -> str:
    """Return a hash of the files' text, so that the output of an older version is not reused."""
    package = Path(__file__).parent.parent
    return hashlib.sha256(b"".join((package / source).read_bytes() for source in sources)).hexdigest()[:12]
