"""Settings of rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    function: str = MISSING
    """A reward that ships, by name (`gsm8k`, `math`, `f1` and others, docs/rewards.md), or yours: `file.py:name` or
    `package.module:name`. Not needed with an environment that scores by itself."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `function`: `reward.args.NAME=VALUE`. A class is instantiated with them."""
    functions: dict[str, Any] = field(default_factory=dict)
    """Several rewards by name instead of `function`, each with its `function` (a text alone means this) and optionally
    `weight` (1), `args`, `model` and `data_source` (the rows it is for): `reward.functions.style={function: format,
    weight: 0.2}`. The reward is their weighted sum; each is a metric `rewards/<name>`."""
    metric: str = "reward"
    """Name of the mean over evaluated rows: `eval/<set>/reward`, or `accuracy` for a function that scores only 1 or 0
    (with it, any other score is a failure)."""
    timeout_s: float = 10.0
    """Longest time in seconds for one call: one completion, or a group if the function takes groups. After it the
    process is killed (an async call is cancelled), and the completion has no reward."""
    max_failure_share: float = 0.5
    """The run stops, with the reason and the row, when more than this share of a worker's last 200 completions got no
    reward, or lack what the learner needs (or failed in one of `rollout.filters`); or when not one of 1,000 groups in a
    row could be trained on. 1: never."""
    workers: int = 1
    """Reward processes per rollout worker, or of the one service with `reward.host=ray`."""
    concurrency: int = 0
    """Async calls that one reward process runs side by side. 0 is 64, or with `code` one per core."""
    model: str = ""
    """With `reward=model`: folder, or name on the hub, of a classifier with one output."""
    host: str = "worker"
    """Where rewards run: `worker`, in processes of each rollout worker, or `ray`, in one service that all share."""
    gpus: float = 0.0
    """GPUs of that service (`reward.host=ray`)."""
