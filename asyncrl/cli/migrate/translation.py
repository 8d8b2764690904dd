"""A translation: our settings with the origin of each, and the settings without an equivalent, with the reason."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.cli.arguments import overrides
from asyncrl.errors import ConfigError

REQUIRED = ("model.path", "data.path", "reward.function")
REWARDED = ("reward.function", "reward.functions", "reward")
PENALISED = "a penalised distribution is not the policy. Penalise repetition in the reward"
EMPTY = (None, "", [], {}, "null")


@dataclass(slots=True)
class Translation:
    """Settings being translated.

    Args:
        given: the user's settings of the other framework, by dotted key.
        defaults: the other framework's defaults of the keys that matter.
        framework: its name.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    framework: str
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Our key -> (value, origin)."""
    left: dict[str, str] = field(default_factory=dict)
    """Their key -> why it has no equivalent."""
    notes: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def take(self, key: str) -> Any:
        """Return the given or default value of their key; None if there is none. The key then counts as translated."""
        self._seen.add(key)
        value = self.given.get(key, self.defaults.get(key))
        # A reference to another setting is not a value.
        return None if value in EMPTY or (isinstance(value, str) and "${" in value) else value

    def number(self, key: str) -> float | None:
        """As `take`. Raises ConfigError if the value is not a finite number."""
        value = self.take(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)):
            return value
        raise ConfigError(
            f"{key}={_shown(value)}: {self.framework} expects a number there. Correct it, or leave it out"
        )

    def count(self, key: str) -> int:
        """As `take`. Raises ConfigError if the value is not a whole number of at least 1."""
        value = self.number(key)
        if value is None or value < 1 or value != int(value):
            raise ConfigError(
                f"{key}={_shown(value)}: {self.framework} expects a whole number of 1 or more there. Correct it, or "
                "leave it out"
            )
        return int(value)

    def put(self, ours: str, value: Any, *theirs: str) -> None:
        names = [name if name in self.given else f"{name} ({self.framework}'s default)" for name in theirs]
        self.settings[ours] = (value, ", ".join(names))

    def move(self, theirs: str, ours: str, written: Callable[[Any], Any] = lambda value: value) -> None:
        """Put their value, if there is one, as `written` gives it."""
        value = self.take(theirs)
        if value is not None:
            self.put(ours, written(value), theirs)

    def refuse(self, theirs: str, why: str) -> None:
        """Note that a key has no equivalent. It is only reported if the user gave it."""
        self._seen.add(theirs)
        if theirs in self.given:
            self.left[theirs] = why

    def apply(
        self, moved: Mapping[str, str], steps: Sequence[Callable[[Translation], None]], reasons: Mapping[str, str]
    ) -> None:
        """Translate keys that keep their value, then apply `steps`, then note the reasons for the rest."""
        for theirs, ours in moved.items():
            self.move(theirs, ours)
        for step in steps:
            step(self)
        self.leave_out(reasons)

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Note reasons, by pattern, for the keys not translated yet; keys that match no pattern are unknown."""
        for key in self.given:
            if key in self._seen:
                continue
            pattern = next((pattern for pattern in reasons if fnmatch.fnmatchcase(key, pattern)), None)
            self.left[key] = (
                reasons[pattern] if pattern else f"this setting is not known here; see the docs of {self.framework}"
            )

    def lines(self) -> list[str]:
        """Return the lines of a settings file, with the origin of each setting, and the rest as comments."""
        found = [f"{key}: {written_in_yaml(value)}  # from {origin}" for key, (value, origin) in self.settings.items()]
        missing = [key for key in REQUIRED if key not in self.settings]
        if any(key in self.settings for key in REWARDED):
            missing = [key for key in missing if key != "reward.function"]
        found += [f"# still needed: {key}" for key in missing]
        found += [f"# no equivalent: {key}={_shown(self.given[key])}: {why}" for key, why in self.left.items()]
        return found + [f"# {note}" for note in self.notes]


OFF = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}
"""Values that exclude no token."""


def truncation(made: Translation, theirs: Mapping[str, str]) -> bool:
    """Translate truncated sampling; `theirs` maps our names to theirs. Returns whether there is any: then the engine
    must be the one that records the support of each token."""
    given = {ours: (key, made.take(key)) for ours, key in theirs.items()}
    narrowed = {ours: each for ours, each in given.items() if each[1] is not None and each[1] not in OFF[ours]}
    for ours, (key, value) in narrowed.items():
        made.put(f"rollout.{ours}", value, key)
    if narrowed:
        made.notes.append(
            f"{', '.join(key for key, _ in narrowed.values())}: engine=transformers records what each token was drawn "
            "from, and the learner renormalises over it. vLLM does not record it yet: for engine=vllm leave them out, "
            "so that it samples from the whole vocabulary (docs/sampling.md)"
        )
    return bool(narrowed)


def warm_up(made: Translation, theirs: str, share: str, steps: str) -> None:
    """Translate the warm-up, which they give as a number of steps or as a share of all `steps`; TRL takes a share below
    1 for the number, too."""
    given, part, whole = made.number(theirs), made.number(share), made.number(steps)
    if given is not None and 0 < given < 1:
        share, part, given = theirs, given, None
    if given is not None and given > 0:
        made.put("learner.warmup_steps", int(given), theirs)
    elif part and whole is not None and whole > 0:
        made.put("learner.warmup_steps", round(part * whole), share, steps)
    elif part:
        made.refuse(share, "give steps: learner.warmup_steps")


def lora_targets(made: Translation, theirs: str) -> None:
    """Translate which layers get adapters; all linear layers are ours without a setting."""
    targets = made.take(theirs)
    if isinstance(targets, list):
        made.put("model.lora_targets", targets, theirs)
    elif targets not in (None, "all-linear"):
        made.refuse(theirs, "give a list of the ends of names: model.lora_targets=[q_proj,v_proj]")


def loggers(made: Translation, theirs: str, always: Sequence[str]) -> None:
    """Translate where metrics go; `always`: their names of the places that asyncrl always writes to, or of none."""
    given = made.take(theirs)
    for logger in given if isinstance(given, list) else [given]:
        if logger in ("wandb", "tensorboard"):
            made.put(f"telemetry.{logger}", True, theirs)
        elif logger not in (None, *always):
            made.refuse(theirs, "metrics go to metrics.jsonl, the screen, wandb and tensorboard")


def cut(made: Translation, side: str, theirs: str, turns: Sequence[str]) -> None:
    """Translate the truncation of prompts, which needs an environment that reads tokens.

    Args:
        turns: their settings for several turns; if one is on, our environment reads messages.
    """
    if any(made.given.get(key) not in (*EMPTY, False) for key in turns):
        made.put("data.overlong", "drop", theirs)
        made.notes.append(
            "data.overlong=drop: an environment of several turns reads the complete messages of a row, which cannot "
            f"be cut on the {side}"
        )
        return
    made.put("data.overlong", f"truncate_{side}", theirs)
    made.notes.append(
        f"data.overlong=truncate_{side} is for environment=single_turn, which reads tokens. With any other built-in "
        "environment (tools, search ...), and with a class of yours that reads messages, give data.overlong=drop or "
        "error"
    )


def written_in_yaml(value: Any) -> str:
    """Write a value in one line that YAML reads back as the same value."""
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")  # YAML reads 1e-06 as text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {written_in_yaml(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(written_in_yaml, value)) + "]"
    if isinstance(value, str) and (not value or set(value) & set("#:{}[],&*?|<>=!%@`'\"\\ ") or value[0] == "-"):
        return "'" + value.replace("'", "''") + "'"
    return overrides.written(value)


def _shown(value: Any) -> str:
    return " ".join(str(value).split())[:80]


def place(path: Any) -> Any:
    """Return a path for our settings: with the home folder expanded, and a list of one as a single path."""
    if isinstance(path, list):
        found = [place(each) for each in path]
        return found[0] if len(found) == 1 else found
    return os.path.expanduser(str(path))
