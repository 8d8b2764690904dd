"""Loads the settings of `asyncrl sft` and checks them. An error names the rule, the value and a way out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.checks.hints import join_problems, nearest
from asyncrl.checks.machine import (
    missing_checkpoint,
    missing_extras,
    missing_model,
    positions_of,
    unfit_model,
    unopenable,
)
from asyncrl.checks.parallel import ranks_divide
from asyncrl.checks.problem import Problems
from asyncrl.checks.resources import missing_devices, unwritable_folders
from asyncrl.checks.rules import values
from asyncrl.checks.rules.checkpoints import copies_last, exports_have_checkpoints
from asyncrl.checks.rules.learner import layers_can_be_compiled, moments_have_a_place
from asyncrl.checks.rules.settings import ranks_have_devices, resume_or_overwrite, run_name_is_a_folder_name
from asyncrl.checks.rules.switches import switches_are_on
from asyncrl.checks.sources import places
from asyncrl.config import compose_settings, config_keys
from asyncrl.errors import ConfigError, DataError
from asyncrl.sft.rows import eval_source, train_sources
from asyncrl.sft.settings import SftConfig, learner_config

FILE = "sft"
"""Name of the file in `configs/`."""


def load_sft(overrides: Sequence[str] = ()) -> SftConfig:
    """Load `configs/sft.yaml` with `overrides`, and check all settings.

    Raises:
        ConfigError: a key is unknown or missing, or a value is refused.
    """
    given = compose_settings(SftConfig, FILE, overrides, not_needed=_not_needed)
    problems = [problem for rule in RULES for problem in rule(given)]
    if problems:
        raise ConfigError(join_problems(problems))
    return given


def _not_needed(node: Any) -> Iterator[str]:
    if node.data.mixture:
        yield "data.path"


FIGURES = ("loss", "token_accuracy")
"""Metrics of an evaluation."""
KEYS = config_keys(SftConfig)
WORDS = {key: each for key, each in values.WORDS.items() if key in KEYS} | {"data.learn": ("every", "last")}
RANGES = {key: each for key, each in values.RANGES.items() if key in KEYS} | {
    "data.max_tokens": (2, math.inf, "at least 2"),
    **dict.fromkeys(("learner.rows_per_step", "learner.max_tokens_per_microbatch"), values.FROM_1),
    **dict.fromkeys(("learner.steps", "eval.rows"), values.FROM_0),
    "learner.epochs": values.POSITIVE,
}
"""As in a run of reinforcement learning for the settings that it has, too."""


def allowed() -> dict[str, str]:
    """Map each setting whose own value is checked by a rule to a description of its allowed values."""
    return values.in_words(WORDS, RANGES) | {"learner.device": "auto, cpu, cuda, cuda:N"}


def known_words(given: SftConfig) -> Problems:
    yield from values.other_words(given, WORDS)
    yield from ranks_have_devices(given)
    yield from ranks_divide(given.learner, given.learner.ranks)


def numbers_in_range(given: SftConfig) -> Problems:
    yield from values.out_of_range(given, RANGES)
    yield from values.out_of_bounds(given)


def evaluation_is_whole(given: SftConfig) -> Problems:
    if given.eval.every > 0 and not given.eval.path:
        yield f"eval.every={given.eval.every} needs held-out rows. Give eval.path=FILE, or eval.every=0"
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given.eval.name):
        yield (
            "eval.name must be 1 to 64 letters, digits, `.`, `_` or `-`, because it is part of the name of a metric; "
            f"got {given.eval.name!r}"
        )
    best, measured = given.learner.keep_best, [f"eval/{given.eval.name}/{each}" for each in FIGURES]
    if best.startswith("eval/") and not given.eval.path:
        yield f"learner.keep_best={best} needs the evaluation that measures it. Give eval.path=FILE"
    elif best.startswith("eval/") and best not in measured:
        yield (
            f"learner.keep_best={best} is not measured. The evaluation measures {' and '.join(measured)} (see "
            f"eval.name).{nearest(best, measured)}"
        )


def sources_are_whole(given: SftConfig) -> Problems:
    try:
        train_sources(given)
        eval_source(given)
    except ConfigError as error:
        yield str(error)


RULES = (
    moments_have_a_place,
    layers_can_be_compiled,
    exports_have_checkpoints,
    copies_last,
    known_words,
    numbers_in_range,
    run_name_is_a_folder_name,
    resume_or_overwrite,
    evaluation_is_whole,
    sources_are_whole,
    switches_are_on,
)


def check_sft_machine(given: SftConfig, *, alone: bool) -> None:
    """Check the model, rows, extras and devices that this machine needs.

    Args:
        alone: whether this process will start the ranks; else it is one of them.

    Raises:
        ConfigError: listing everything that is missing.
    """
    config = learner_config(given)
    problems = [*missing_model("model.path", given.model.path), *_too_long(given)]
    problems += unfit_model(given.model.path, given.learner, given.data.max_tokens)
    held_out = eval_source(given)
    for source in (*train_sources(given), *([held_out] if held_out else [])):
        try:
            places(source)
        except DataError as error:
            problems.append(str(error))
    problems += [*missing_extras(config.model, config.telemetry), *missing_checkpoint(given.resume)]
    problems += unopenable("learner.copy_to", given.learner.copy_to)
    role = "local" if alone else "learner"
    problems += ranks_divide(given.learner, given.learner.ranks, started=alone)
    problems += [*missing_devices(config, role), *unwritable_folders(config, role)]
    if problems:
        raise ConfigError(join_problems(problems))


def _too_long(given: SftConfig) -> Problems:
    positions = positions_of(given.model.path) if Path(given.model.path).is_dir() else None
    if positions is not None and given.data.max_tokens > positions:
        yield (
            f"data.max_tokens={given.data.max_tokens} is more than the {positions} positions of the model of "
            f"model.path. Set data.max_tokens={positions} or less"
        )
