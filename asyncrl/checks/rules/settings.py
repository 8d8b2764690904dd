"""Rules for words and numbers: the values that each setting may have by itself, and the run folder."""

from __future__ import annotations

import math
import re
from pathlib import Path

from asyncrl.checks.evaluations import eval_sets
from asyncrl.checks.hints import nearest, of_yaml
from asyncrl.checks.problem import Problems
from asyncrl.checks.rewards import MODEL_REWARD, reward_terms
from asyncrl.checks.rules.sampling import truncation_needs_samples
from asyncrl.checks.rules.values import RANGES, WORDS, in_words, other_words, out_of_bounds, out_of_range
from asyncrl.errors import ConfigError
from asyncrl.schema import Config, RunSettings
from asyncrl.settings.loss import rules as of_losses

ENVIRONMENTS = ("single_turn", "tools", "python", "search", "reasoning_gym", "gymnasium", "openai", "verifiers")
COLDEST, HOTTEST = 0.01, 100
SAID = {
    "engine.device": "auto, cpu, cuda, cuda:N",
    "learner.device": "auto, cpu, cuda, cuda:N",
    "rollout.temperature": f"{COLDEST} to {HOTTEST}",
    "eval.temperature": f"0, or {COLDEST} to {HOTTEST}",
    "learner.skip_spikes": "0, or above 1",
    "replay.pipeline_depth": "0 to replay.max_staleness",
}
"""Values allowed by the other rules, in words."""


def allowed() -> dict[str, str]:
    """Return key -> its allowed values in words, for the settings whose own value is checked by a rule."""
    found = in_words(WORDS, RANGES)
    found |= {f"loss.{key}": ", ".join(choices) for key, choices in of_losses.CHOICES.items()}
    found |= {f"loss.{key}": rule for key, _, _, rule in of_losses.RANGES}
    return found | SAID


def known_words(config: Config) -> Problems:
    yield from other_words(config, WORDS)
    yield from _known_device("engine.device", config.engine.device)
    yield from ranks_have_devices(config)


def _known_device(key: str, device: str) -> Problems:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        yield f"{key} must be auto, cpu, cuda or cuda:N; got {device!r}.{nearest(device, ('auto', 'cpu', 'cuda'))}"


def ranks_have_devices(config: RunSettings) -> Problems:
    device, ranks = config.learner.device, config.learner.ranks
    unknown = list(_known_device("learner.device", device))
    yield from unknown
    if ":" in device and ranks > 1 and not unknown:
        yield one_device_for_all(device, ranks)


def one_device_for_all(device: str, ranks: int) -> str:
    """Return the message for a numbered `learner.device` with several ranks on a machine."""
    return (
        f"learner.device={device} puts all {ranks} ranks of a machine on one GPU; use learner.device=cuda, which gives "
        "each its own (CUDA_VISIBLE_DEVICES chooses which), or learner.ranks=1"
    )


def numbers_in_range(config: Config) -> Problems:
    yield from out_of_range(config, RANGES)
    yield from out_of_bounds(config)
    yield from _temperatures(config)
    if config.learner.skip_spikes != 0 and not 1 < config.learner.skip_spikes < math.inf:
        yield (
            "learner.skip_spikes must be 0 (off) or above 1, as a multiple of the median; got "
            f"{config.learner.skip_spikes}"
        )


def _temperatures(config: Config) -> Problems:
    for key, value in (
        ("rollout.temperature", config.rollout.temperature),
        ("eval.temperature", config.eval.temperature),
    ):
        if 0 < value < COLDEST or HOTTEST < value < math.inf:
            greedy = " eval.temperature=0 is greedy" if key.startswith("eval") else ""
            yield (
                f"{key} must be {COLDEST} to {HOTTEST}; got {value}. Below {COLDEST}, vLLM samples at {COLDEST} all "
                f"the same, and logits divided by it overflow.{greedy}"
            )


def run_name_is_a_folder_name(config: RunSettings) -> Problems:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", config.run.name) or set(config.run.name) == {"."}:
        yield f"run.name must be 1 to 64 letters, digits, `.`, `_` or `-`; got {config.run.name!r}. Rename the run"
    if not config.run.dir:
        yield "run.dir must not be empty. Leave it out to use runs/<run.name>"


def resume_or_overwrite(config: RunSettings) -> Problems:
    if config.resume != "never" and config.overwrite:
        yield (
            f"resume={config.resume} and overwrite=true contradict each other: one keeps the run folder, the other "
            "deletes what is in it. Give one of them"
        )
    # A path has a slash or names a checkpoint folder; otherwise a misspelt word would be taken for a path.
    if config.resume not in ("never", "auto") and "/" not in config.resume and not Path(config.resume).exists():
        hint = nearest(config.resume, ("never", "auto")) or of_yaml(config.resume)
        yield f"resume must be never, auto or the path of a checkpoint; got {config.resume!r}.{hint}"


def reward_is_whole(config: Config) -> Problems:
    reward = config.reward
    try:
        terms = reward_terms(reward)
    except ConfigError as error:
        yield str(error)
        return
    for term in terms:
        key = term.room
        if term.function == MODEL_REWARD and not term.model:
            of = term.name or "reward=model"
            yield f"{of} needs a model. Set {key}.model=PATH, a classifier with one output"
    if reward.host == "ray" and not terms:
        yield (
            "reward.host=ray shares a reward among the workers, but reward.function is not set. Set it, or leave "
            "reward.host out"
        )
    if reward.host == "ray" and config.rollout.host != "ray":
        yield (
            f"reward.host=ray needs Ray, which rollout.host={config.rollout.host} does not start. Set "
            "rollout.host=ray, or reward.host=worker"
        )
    if reward.gpus > 0 and reward.host != "ray":
        yield (
            f"reward.gpus={reward.gpus} is only for a reward service on Ray; got reward.host={reward.host}. Set "
            "reward.host=ray, or reward.gpus=0 (reward processes see the GPUs of their rollout worker)"
        )


SPEC = re.compile(r".+:[A-Za-z_]\w*")
"""`file.py:name` or `package.module:name`."""


def environment_is_one(config: Config) -> Problems:
    name = config.environment.name
    if name not in ENVIRONMENTS and not SPEC.fullmatch(name):
        yield (
            f"environment.name must be one of {', '.join(ENVIRONMENTS)}, or yours as file.py:Name or "
            f"package.module:Name; got {name!r}.{nearest(name, ENVIRONMENTS)}"
        )


def prompts_are_cut_where_they_are_read(config: Config) -> Problems:
    # A user's own environment is checked where its class is known, in `environments.registry`.
    if config.environment.name in ENVIRONMENTS[1:] and config.data.overlong.startswith("truncate_"):
        yield cuts_nothing(config.environment.name, config.data.overlong)


def cuts_nothing(environment: str, overlong: str) -> str:
    """Return the message for a truncation that has no effect on an environment."""
    return (
        f"data.overlong={overlong} shortens the tokens of a prompt, but environment={environment} makes its first "
        "request from the whole row. Set data.overlong=drop or error, or a larger data.max_prompt_tokens"
    )


def filters_name_functions(config: Config) -> Problems:
    for spec in config.rollout.filters:
        if not SPEC.fullmatch(spec):
            yield (
                f"rollout.filters names functions as file.py:name or package.module:name; got {spec!r}. Example: "
                "rollout.filters=[my_filters.py:keep]"
            )


def evaluation_has_rows(config: Config) -> Problems:
    if config.eval.every > 0 and not config.eval.path and not config.eval.sets:
        yield (
            f"eval.every={config.eval.every} needs eval.path, a JSONL file of held-out rows, or eval.sets. Give "
            "eval.path=..., or eval.every=0"
        )
    yield from _evaluation_is_one(config)
    try:
        sets = eval_sets(config)
    except ConfigError as error:
        yield str(error)
        return
    known = {problem for rule in OF_A_SET for problem in rule(config)}
    for each in sets:
        found = (problem for rule in OF_A_SET for problem in rule(each.config))
        yield from (f"{each.key}: {problem}" for problem in found if problem not in known)


def _evaluation_is_one(config: Config) -> Problems:
    """Check the settings of an evaluation by themselves."""
    if config.eval.samples > 1 and config.eval.temperature == 0:
        yield (
            f"eval.samples={config.eval.samples} at eval.temperature=0 would give the same completion "
            f"{config.eval.samples} times. Set eval.temperature=1, or eval.samples=1"
        )
    if not math.isfinite(config.eval.pass_score):
        yield f"eval.pass_score must be a finite number; got {config.eval.pass_score}"
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", config.eval.name):
        yield (
            "eval.name is part of the names of metrics, so it must be 1 to 64 letters, digits, `.`, `_` or `-`; got "
            f"{config.eval.name!r}"
        )


OF_A_SET = (
    *(known_words, numbers_in_range, reward_is_whole, environment_is_one, prompts_are_cut_where_they_are_read),
    _evaluation_is_one,
    truncation_needs_samples,
)
"""Rules that a single entry of `eval.sets` can break."""

RULES = (
    known_words,
    numbers_in_range,
    run_name_is_a_folder_name,
    resume_or_overwrite,
    reward_is_whole,
    environment_is_one,
    prompts_are_cut_where_they_are_read,
    filters_name_functions,
    evaluation_has_rows,
)
