"""Metrics of a step: from the plan, and from what every rank measured, combined on every rank."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.parallel.collectives import texts_of_data
from asyncrl.losses.diagnostics import LOG_RATIO_EDGES, Sums, ratio_counts, summarize
from asyncrl.types import StepPlan, members_of

Numbers = tuple[float, ...]
Bins = tuple[list[float], list[float]]
"""Bin edges, one more than there are counts, and the counts."""


@dataclass(frozen=True, slots=True)
class MicroBatchMetrics:
    """Numbers of one micro-batch that are still on the device: reading them waits for all work queued there."""

    sums: Sums
    per_update: Mapping[str, Tensor] = field(default_factory=dict)

    def parts(self) -> dict[str, Mapping[str, Tensor]]:
        """The numbers, by the field of `Measured` that they belong to."""
        sums = self.sums
        return {
            "ratios": {name: torch.stack([n.double(), d.double()]) for name, (n, d) in sums.means.items()},
            **{"tokens": sums.tokens, "ages": sums.ages, "sequences": sums.sequences, "maxima": sums.maxima},
            "per_update": self.per_update,
        }


@dataclass(slots=True, kw_only=True)
class Measured:
    """Numbers of one rank in one step. The field that holds a number says how it combines over micro-batches, updates
    and ranks; its name does not. Numbers that are the same on every rank are counted only on rank 0.
    """

    ratios: dict[str, Numbers] = field(default_factory=dict)
    """Name -> (numerator, denominator), each summed; the metric is their quotient."""
    tokens: dict[str, Numbers] = field(default_factory=dict)
    """`tokens`, `ages` and `sequences` are those of `asyncrl.losses.diagnostics.Sums`."""
    ages: dict[str, Numbers] = field(default_factory=dict)
    sequences: dict[str, Numbers] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    """Summed."""
    per_update: dict[str, float] = field(default_factory=dict)
    """Summed, then divided by `updates`."""
    updates: float = 0.0
    """Optimizer steps on the batch; counted on rank 0."""
    spreads: dict[str, Numbers] = field(default_factory=dict)
    """Stem -> (sum, sum of squares, count), each summed; the metrics are `<stem>mean` and `<stem>std`."""

    @classmethod
    def of(cls, *told: MicroBatchMetrics) -> Measured:
        """Combine them, with a single transfer from the device."""
        everything = [each.parts() for each in told]
        tensors = [tensor for parts in everything for part in parts.values() for tensor in part.values()]
        flat = [tensor.detach().double().reshape(-1) for tensor in tensors]
        values: Iterator[float] = iter(torch.cat(flat).tolist() if flat else [])
        together = cls()
        for parts in everything:
            read: dict[str, Any] = {
                kind: {name: tuple(itertools.islice(values, tensor.numel())) for name, tensor in part.items()}
                for kind, part in parts.items()
            }
            for kind in ("maxima", "per_update"):  # a single number each
                read[kind] = {name: value for name, (value,) in read[kind].items()}
            together.add(cls(**read))
        return together

    def add(self, other: Measured) -> None:
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)
        for into, values in ((self.totals, other.totals), (self.per_update, other.per_update)):
            for name, value in values.items():
                into[name] = into.get(name, 0.0) + value
        self.updates += other.updates
        for into, values in zip(self._added_up(), other._added_up(), strict=True):
            for name, numbers in values.items():
                had = into.get(name, (0.0,) * len(numbers))
                into[name] = tuple(mine + theirs for mine, theirs in zip(had, numbers, strict=True))

    def _added_up(self) -> Iterator[dict[str, Numbers]]:
        """The fields whose tuples are summed element by element."""
        yield from (self.ratios, self.tokens, self.ages, self.sequences, self.spreads)

    def row(self) -> dict[str, float]:
        """Metrics by name."""
        sums = Sums(
            means={name: (_double(n), _double(d)) for name, (n, d) in self.ratios.items()},
            tokens={place: _double(numbers) for place, numbers in self.tokens.items()},
            ages={age: _double(numbers) for age, numbers in self.ages.items()},
            sequences={place: _double(numbers) for place, numbers in self.sequences.items()},
            maxima={name: _double(value) for name, value in self.maxima.items()},
        )
        row = {name: value.item() for name, value in summarize(sums).items()} | self.totals
        row |= {name: value / max(1.0, self.updates) for name, value in self.per_update.items()}
        for stem, (total, squares, count) in self.spreads.items():
            mean = total / max(1.0, count)
            row |= {f"{stem}mean": mean, f"{stem}std": math.sqrt(max(squares / max(1.0, count) - mean**2, 0.0))}
        return row | explained_variance(row)

    def histograms(self) -> dict[str, Bins]:
        """For each staleness, the trained tokens by log-ratio of learner to behavior policy, over all updates."""
        return {
            f"histogram/ratio/age_{age}": (list(LOG_RATIO_EDGES), list(ratio_counts(numbers)))
            for age, numbers in self.ages.items()
        }


def _double(value: float | Numbers) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def explained_variance(row: Mapping[str, float]) -> dict[str, float]:
    """With a critic, `critic/explained_variance`: 1 - Var(target - value) / Var(target) before the update."""
    # Targets that are all equal have no variance to explain.
    if row.get("critic/target_std", 0.0) <= 1e-6:
        return {}
    return {"critic/explained_variance": 1.0 - (row["critic/residual_std"] / row["critic/target_std"]) ** 2}


def over_ranks(mine: Measured, device: torch.device) -> Measured:
    """Combine the numbers of all ranks. Ranks may have different names (a rank may have no token of some age), so the
    names are sent with the numbers: two small all-gathers per step."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    together = Measured()
    for theirs in texts_of_data(json.dumps(asdict(mine)), device):
        together.add(Measured(**json.loads(theirs)))
    return together


def plan_metrics(plan: StepPlan) -> dict[str, float]:
    """Metrics from the headers alone: rewards of all episodes, staleness of the trained tokens.

    `staleness/hist_<k>` is the fraction of trained tokens that are k versions old.
    """
    members = [[group.trajectories[place] for place in members_of(group.trajectories)] for group in plan.groups]
    rewards = [np.array([each.reward for each in group]) for group in members]
    lengths = [t.loss_tokens for group in plan.groups for t in group.trajectories]  # without observations
    fresh = plan.tokens_by_staleness()
    count = sum(fresh.values())
    row = {"staleness/mean": 0.0, "staleness/max": float(max(fresh, default=0)), "step/groups": float(len(plan.groups))}
    if count:
        row["staleness/mean"] = sum(age * tokens for age, tokens in fresh.items()) / count
        row |= {f"staleness/hist_{age}": tokens / count for age, tokens in fresh.items()}
    if rewards:
        flat = np.concatenate(rewards)
        row |= {
            "reward/mean": float(flat.mean()),
            "reward/std": float(flat.std()),
            "reward/zero_variance_groups": float(np.mean([group.min() == group.max() for group in rewards])),
            "completion/length_mean": float(np.mean(lengths)),
        }
    headers = [trajectory for group in members for trajectory in group]
    for name in sorted({name for trajectory in headers for name in trajectory.rewards}):
        known = [trajectory.rewards[name] for trajectory in headers if name in trajectory.rewards]
        row[f"rewards/{name}"] = float(np.mean(known))
    told = [trajectory.earned for trajectory in headers if trajectory.turn_rewards]
    if told:
        each = np.concatenate(told)
        row |= {
            "reward/turns": float(np.mean([len(turns) for turns in told])),
            "reward/turn_mean": float(each.mean()),
            "reward/turn_std": float(each.std()),
        }
    return row


BINS = 16
WIDEST = 1e300
"""Largest magnitude of a reward in a histogram: no bins can be computed for a larger range."""
NEAR = 1e-9
"""Relative to their size: numbers no further apart differ by rounding only, and numpy finds no bins between them."""
AGES = 256
"""Limit on bins of ages: W&B refuses more than 512."""


def plan_histograms(plan: StepPlan) -> dict[str, Bins]:
    """Histograms of a batch: rewards of episodes, sampled tokens per trajectory, staleness of the trained tokens."""
    found: dict[str, Bins] = {}
    rewards = [group.trajectories[at].reward for group in plan.groups for at in members_of(group.trajectories)]
    lengths = [trajectory.loss_tokens for group in plan.groups for trajectory in group.trajectories]
    for name, values in (("histogram/reward", rewards), ("histogram/completion/length", lengths)):
        known = np.array(values, np.float64)
        known = known[np.abs(known) < WIDEST]
        if len(known):
            low, high = float(known.min()), float(known.max())
            size = max(abs(low), abs(high))
            around = max(0.5, NEAR * size) if high - low <= NEAR * size else 0.0
            counts, edges = np.histogram(known, BINS, range=(low - around, high + around))
            found[name] = edges.tolist(), counts.astype(float).tolist()
    ages = plan.tokens_by_staleness()
    if ages:
        wide = max(ages) // AGES + 1
        counts = [0.0] * (max(ages) // wide + 1)
        for age, tokens in ages.items():
            counts[age // wide] += tokens
        found["histogram/staleness"] = [wide * place - 0.5 for place in range(len(counts) + 1)], counts
    return found
