"""Settings of evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    every: int = 0
    """Steps between evaluations, which run beside training on the workers' engines and delay nothing. With `eval.path`
    or `eval.sets` the first and the last weights are evaluated too; with 0 only they."""
    path: str = ""
    """Rows to evaluate, given as in `data.path`; empty: none from here (see `sets`)."""
    name: str = "heldout"
    """Name of the set in the metrics `eval/<name>/...`."""
    rows: int = 256
    """Rows taken from the start of the file, at most as many as there are. `asyncrl eval` takes all unless it is
    given."""
    chunk: int = 64
    """Rows that a worker takes at a time."""
    samples: int = 1
    """Completions of each row. With several there are pass@k, best@k and majority votes, as in `eval/<name>/pass@8`."""
    temperature: float = 0.0
    """Sampling temperature of evaluations; 0 is greedy."""
    top_p: float = 1.0
    """As `rollout.top_p`, for evaluations, with any engine; not taken from the training's setting."""
    top_k: int = 0
    """As `rollout.top_k`, for evaluations, with any engine; not taken from the training's setting."""
    min_p: float = 0.0
    """As `rollout.min_p`, for evaluations, with any engine; not taken from the training's setting."""
    max_new_tokens: int = 0
    """Longest completion in tokens; 0 is as long as `rollout.max_new_tokens`."""
    pass_score: float = 1.0
    """Lowest score with which a sample passes (pass@k)."""
    answer: str = "auto"
    """Where a majority vote finds the answer in a completion: the last `boxed`, `tag` (`<answer>`), `hash` (`####`) or
    `number`, or the whole `text`. `auto` takes the first there is of tag, box and hash; `none` holds no vote."""
    sets: dict[str, Any] = field(default_factory=dict)
    """More sets by name, each with its `path` and any of the settings of this group, `environment`, `reward`,
    `prompt_column`, `where` and `args` that should differ: `eval.sets.aime.path=FILE eval.sets.aime.samples=16
    eval.sets.aime.reward=math`. See docs/evaluation.md."""
