"""Hints for refused settings: the nearest valid word, and why some keys are missing on purpose."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from asyncrl.errors import ConfigError

REFUSED_ON_PURPOSE = {
    "repetition_penalty": (
        "a penalised distribution is not the policy, so its log-probs cannot be corrected for. Penalise repetition in "
        "the reward function"
    ),
    "trust_remote_code": "asyncrl never runs code that comes with a checkpoint. Use a model class of transformers",
    "api_key": "keys never go into settings or command lines. Use the tool's own login command or variable",
    "wandb_key": "keys never go into settings or command lines. Run `wandb login` or set WANDB_API_KEY",
    "wandb_project": "Weights & Biases reads its own environment. Set WANDB_PROJECT",
}
"""Keys known from other frameworks that are missing here for a reason, by the last part of the key."""

FREE_FORM = (
    *("engine.vllm", "advantage.components", "model.chat", "environment.args", "reward.args", "reward.functions"),
    *("data.mixture", "data.where", "data.args", "eval.sets", "loss.args", "advantage.args", "learner.hook_args"),
)
"""Settings that are mappings with arbitrary keys."""

NO_SWEEP = (
    "A sweep is one run for each value, each with a run.name of its own; `asyncrl compare RUN RUN ...` puts them side "
    "by side"
)

ELSEWHERE = {
    "learner.groups_per_step": "batch_size train_batch_size",
    "learner.lr": "learning_rate",
    "rollout.group_size": "num_generations n",
    "rollout.max_new_tokens": "max_tokens max_completion_length max_response_length",
    "data.max_prompt_tokens": "max_prompt_length",
    "replay.max_staleness": "max_off_policy_steps max_head_offpolicyness staleness_threshold",
    "replay.pipeline_depth": "async_queue_size",
    "advantage.estimator": "adv_estimator",
    "advantage.lam": "lam_gae",
    "critic.warmup_steps": "critic_warmup",
    "critic.value_clip": "cliprange_value",
    "advantage.kl_target": "target_kl",
    "learner.clip_norm": "max_grad_norm gradient_clipping",
    "learner.steps": "total_steps max_steps",
    "learner.epochs": "num_train_epochs total_epochs",
    "loss.entropy_coef": "entropy_coeff",
    "learner.save_every": "save_freq save_steps",
    "eval.every": "test_freq eval_steps",
    "run.dir": "output_dir",
    "run.name": "experiment_name",
    "resume": "resume_from_checkpoint resume_mode",
    "reward.functions": "reward_funcs reward_weights",
}
"""Our settings -> their names in other frameworks, by the last part of the key."""

ELSEWHERE_OF_ROWS = {
    "learner.rows_per_step": "batch_size train_batch_size per_device_train_batch_size",
    "learner.epochs": "num_train_epochs total_epochs",
    "data.max_tokens": "max_length max_seq_length",
    "data.overlong": "truncation",
    "data.prompt_column": "prompt_key",
    "data.completion_column": "response_key",
    "data.messages_column": "messages_key",
    "learner.schedule": "lr_scheduler_type lr_scheduler",
    "learner.keep_checkpoints": "save_total_limit",
}
"""The same for `asyncrl sft`."""

OTHERWISE = {"reward.function": "Several are `reward.functions.NAME=FILE.py:FUNCTION`, one for each (docs/rewards.md)"}
"""Hints for values of a wrong type, by key."""

MOST_WRITTEN = 10**15
"""Limit on the numbers that a hint writes out."""
SECOND_THOUGHT = ("critic", "reference", "eval", "telemetry", "ray")
"""Sections that most runs do not change, suggested last: `lr` probably means the learner's, not the critic's."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean X?` if a known word is close; otherwise an empty string."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean `{found[0]}`?" if found else ""


YAML_WORDS = ("yes", "no", "on", "off", "true", "false")


def of_yaml(value: Any) -> str:
    """Return a hint if a refused value is one of the words that YAML reads as true or false; otherwise an empty
    string."""
    if str(value).lower() not in YAML_WORDS:
        return ""
    return (
        " In a YAML file yes, no, on and off mean true and false; this setting takes neither. Text needs quotes there"
    )


def _of_number(key: str, value: str) -> str:
    """Return a hint for a number that is refused because it is written with an exponent or a decimal point."""
    try:
        number = Decimal(value.strip("\"'"))
    except InvalidOperation:
        return of_yaml(value).strip()
    if not number.is_finite() or number != number.to_integral_value() or abs(number) > MOST_WRITTEN:
        return "It is a whole number"
    return f"It is a whole number, written without exponent and point: {key}={int(number)}"


def refuse_others(
    key: str, given: Iterable[Any], known: Sequence[str], has: str = "there is no such setting; there are"
) -> None:
    """Raises ConfigError: the mapping of the setting `key` has an entry that is not one of `known`."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{key}.{name}: {has} {', '.join(known)}.{nearest(str(name), known)}")


def nearest_key(key: str, known: Sequence[str]) -> str:
    """Return the valid key that a user most likely meant, or an empty string: by another framework's name, by the last
    part, or by the whole key."""
    last = key.rsplit(".", 1)[-1]
    for said in (ELSEWHERE, ELSEWHERE_OF_ROWS):
        for ours, theirs in said.items():
            if last in theirs.split() and ours in known:
                return ours
    same_last = [other for other in known if other.rsplit(".", 1)[-1] == last]
    if same_last:
        return min(same_last, key=lambda other: (other.startswith(SECOND_THOUGHT), len(other)))
    by_whole = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if by_whole:
        return by_whole[0]
    by_last = difflib.get_close_matches(last, [other.rsplit(".", 1)[-1] for other in known], n=1, cutoff=0.6)
    return next((other for other in known if by_last and other.rsplit(".", 1)[-1] == by_last[0]), "")


NO_TEXT = ("null", "true", "false", "nan", "inf")
"""Words that Hydra does not read as names; where it needs a name, it fails with a ValueError of its own."""


def refuse_unknown_keys(overrides: Sequence[str], *, known: Sequence[str], groups: Sequence[str]) -> None:
    """Check every `key=value` before Hydra does, which accepts new keys after a `+` and suggests no similar key.

    Raises:
        ConfigError: names every argument that is not a setting, each with the way out.
    """
    problems = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if spaced := _spaced(text, known, groups):
            problems.append(spaced)
        elif text.startswith("~"):
            problems.append(
                f"`{text}`: settings can be changed, but not added or removed. Write `{key.lstrip('~')}=...`"
            )
        elif not equals:
            problems.append(f"`{text}` is not of the form key=value.{nearest(text, known)} See `asyncrl --help`")
        elif key in groups:
            if not re.fullmatch(r"[A-Za-z_]\w*(/[A-Za-z_]\w*)?", value) or value.lower() in NO_TEXT:  # as smoke/NAME
                what = f"`{text}`: `{key}` takes the name of a file in configs/{key}/, got {value!r}."
                problems.append(what + _of_ones_own(key, value))
        elif re.search(r"\d{4300}", value):  # Python refuses to parse longer numbers
            problems.append(f"`{key}={value[:20]}...` has a number of {len(value)} digits. Give a shorter one")
        elif key not in known and not key.startswith(tuple(f"{free}." for free in FREE_FORM)):
            problems.append(_unknown_key(key.lstrip("+"), text, known, groups))
    if problems:
        raise ConfigError(join_problems(problems))


OWN = {"data": "path", "environment": "name", "model": "path", "reward": "function"}
"""For each group, the setting that users mean if they assign something of their own to the group."""


def _of_ones_own(group: str, value: str) -> str:
    return f" For your own, write `{group}.{OWN[group]}={value}`" if group in OWN else ""


def _spaced(text: str, known: Sequence[str], groups: Sequence[str]) -> str:
    """Explain spaces around `=`. A shell splits `key = value` into three arguments, and for the key alone the other
    hint would suggest the key itself."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if key not in known and key not in groups and text.strip() != "=":
        return ""
    if not equals or not key:
        return f"`{text}` is not of the form key=value: write `{key or 'key'}=VALUE`, without spaces around the `=`"
    alone = text.partition("=")[0] != key
    return f"`{text}`: there is a space before the `=`. Write `{key}={value}`, without it" if alone else ""


def join_problems(problems: Sequence[str]) -> str:
    """Return one problem as it is, several as a list, so that a user sees all of them at once."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} settings are refused:\n" + "\n".join(f"  - {problem}" for problem in problems)


def explain_refused_value(message: str, overrides: Sequence[str]) -> str:
    """Explain what Hydra or OmegaConf refused in terms of the setting: the rule, the value, the way out.

    `message` is their error, `overrides` are the user's arguments; the keys themselves are known to be valid.
    """
    if "Could not find" in message and "Available options" in message:
        return _unknown_option(message)
    full_key = re.search(r"full_key: (\S+)", message)
    reason = message.strip().splitlines()[0].rstrip(".")
    if full_key:
        key = full_key.group(1)
        given = _refused_one([text for text in overrides if text.split("=", 1)[0] == key], reason) or key
        value, known = given.partition("=")[2], f"`asyncrl settings {key}` says which values it takes"
        if reason.endswith("is not a ListConfig, list or tuple") and value and not set(value) & set("'\"[]"):
            known = f"It is a list: '{key}={_in_quotes(f'[{value}]')}'"
        if reason.endswith(("to Integer", "to Float")):
            known = (_of_number(key, value) if reason.endswith("Integer") else of_yaml(value).strip()) or known
        way_out = OTHERWISE.get(key, known)
        return f"`{given}` is refused: {reason}. {way_out}"
    if any(word in message for word in ("parsing", "mismatched", "NoViable", "no viable", "Ambiguous")):
        sweep = f". {NO_SWEEP}" if "Ambiguous" in message else ""
        return f"an argument could not be read as `key=value`: {reason}. {_how_to_quote(overrides)}{sweep}"
    return f"the settings could not be composed: {reason}. Compare with `configs/` and README.md"


def _refused_one(given: Sequence[str], reason: str) -> str:
    """Return, of several values for one key, the one that `reason` quotes, or else the last, which is in effect."""
    quoted = [text for text in given if (value := text.partition("=")[2].strip("\"'")) and f"'{value}'" in reason]
    return next(reversed(quoted or list(given)), "")


def _how_to_quote(overrides: Sequence[str]) -> str:
    """Show the arguments that Hydra's grammar most likely could not parse as they should be typed."""
    rule = "A value with spaces, commas, letters beyond ASCII or any of ~{}[]=$ needs quotes that reach the program"
    pairs = [text.partition("=") for text in overrides]
    suspects = [(key, value) for key, _, value in pairs if not re.fullmatch(r"[A-Za-z0-9_./:%@+-]*", value)]
    if any(value.startswith("~") for _, value in suspects):
        return f'{rule}, and `~` is not expanded inside an argument: write key="$HOME/..."'
    typed = " ".join(f"'{key}={_in_quotes(value)}'" for key, value in suspects if not set(value) & set("'\""))
    return f"{rule}: {typed or 'key=' + repr(chr(34) + 'a value' + chr(34))}"


def _in_quotes(value: str) -> str:
    """Put the entries of a list in quotes; a quoted list as a whole would be a text."""
    if value.startswith("[") and value.endswith("]"):
        return f"[{','.join(f'{chr(34)}{entry}{chr(34)}' for entry in value[1:-1].split(','))}]"
    return f'"{value}"'


def _unknown_key(key: str, given: str, known: Sequence[str], groups: Sequence[str]) -> str:
    last = key.rsplit(".", 1)[-1]
    if last in REFUSED_ON_PURPOSE:
        return f"`{given}` is refused: {REFUSED_ON_PURPOSE[last]}"
    if key in known:
        return f"`{given}`: settings can be changed, but not added or removed. Write `{key}=...`"
    suggestion = nearest_key(key, known)
    if suggestion:
        return f"there is no setting `{key}` (given: `{given}`). Did you mean `{suggestion}`?"
    group = [] if "." in key else difflib.get_close_matches(key, groups, n=1, cutoff=0.6)
    if group:
        return f"there is no setting `{key}` (given: `{given}`). Did you mean `{group[0]}=NAME`, a file of configs/?"
    rooms = sorted({other.split(".", 1)[0] for other in known})
    room = key.split(".", 1)[0]
    here = [other for other in known if other.split(".", 1)[0] == room] or [*rooms, "experiment"]
    return f"there is no setting `{key}` (given: `{given}`). Known here: {', '.join(here)}"


def _unknown_option(message: str) -> str:
    """Explain that a config group exists, but not the file in it."""
    wanted = re.search(r"Could not find '([^']+)'", message)
    group, _, name = (wanted.group(1) if wanted else "").partition("/")
    folder = name.rpartition("/")[0] if group == "experiment" else ""  # the only group with a subfolder
    lines = message.split("Available options", 1)[1].splitlines()[1:]
    options = [line.strip() for line in lines if line.startswith("\t") and "=" not in line]
    options = [f"{folder}/{option}" for option in options] if folder else options
    said = f"`{group}={name}`: there is no such choice.{nearest(name, options)} Choices: {', '.join(options)}"
    own = _of_ones_own(group, name)
    return f"{said}.{own}" if own else said
