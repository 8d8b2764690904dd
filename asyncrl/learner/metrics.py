"""The numbers of a step: what the plan says, and what every rank measured, brought together on every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.losses.diagnostics import Sums, summarize
from asyncrl.types import StepPlan, TrajectoryGroup


@dataclass(slots=True, kw_only=True)
class Measured:
    """Numbers of one rank in one step, in the three ways in which they combine over micro-batches and ranks."""

    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> (numerator, denominator), each added up."""
    maxima: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, sums: Sums, maxima: Mapping[str, Tensor], totals: Mapping[str, Tensor]) -> Measured:
        """From scalar tensors, with one transfer from the device."""
        pairs = [scalar for pair in sums.values() for scalar in pair]
        scalars = [*pairs, *maxima.values(), *totals.values()]
        if not scalars:
            return cls()
        values = iter(torch.stack([scalar.detach().double() for scalar in scalars]).tolist())
        return cls(
            ratios={name: (next(values), next(values)) for name in sums},
            maxima={name: next(values) for name in maxima},
            totals={name: next(values) for name in totals},
        )

    def add(self, other: Measured) -> None:
        for name, (numerator, denominator) in other.ratios.items():
            mine = self.ratios.get(name, (0.0, 0.0))
            self.ratios[name] = mine[0] + numerator, mine[1] + denominator
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)
        for name, value in other.totals.items():
            self.totals[name] = self.totals.get(name, 0.0) + value

    def row(self) -> dict[str, float]:
        """Metrics by name."""
        sums = {name: (_double(n), _double(d)) for name, (n, d) in self.ratios.items()}
        means = summarize(sums, {name: _double(value) for name, value in self.maxima.items()})
        return with_spreads({name: value.item() for name, value in means.items()}) | self.totals


def _double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


SPREADS = ("advantage/", "critic/target_", "critic/residual_")


def with_spreads(row: dict[str, float]) -> dict[str, float]:
    """For each of `SPREADS`, the standard deviation in place of the mean square.

    With a critic also `critic/explained_variance`, 1 - Var(target - value) / Var(target) before the update.
    """
    row = dict(row)
    for stem in (stem for stem in SPREADS if f"{stem}square" in row):
        row[f"{stem}std"] = math.sqrt(max(row.pop(f"{stem}square") - row[f"{stem}mean"] ** 2, 0.0))
    # Targets that are all alike have no variance to explain.
    if row.get("critic/target_std", 0.0) > 1e-6:
        row["critic/explained_variance"] = 1.0 - (row["critic/residual_std"] / row["critic/target_std"]) ** 2
    return row


def over_ranks(mine: Measured, device: torch.device) -> Measured:
    """Everyone's numbers together. Ranks may know different names (a rank may have no token of some age), so names
    travel with the numbers: two small all-gathers per step."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    text = json.dumps([mine.ratios, mine.maxima, mine.totals]).encode()
    size = torch.tensor([len(text)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(one) for one in sizes)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    together = Measured()
    for theirs in everyone:
        ratios, maxima, totals = json.loads(theirs.cpu().numpy().tobytes())
        together.add(Measured(ratios={k: (n, d) for k, (n, d) in ratios.items()}, maxima=maxima, totals=totals))
    return together


def plan_metrics(plan: StepPlan) -> dict[str, float]:
    """What the headers alone tell: rewards of all trajectories, staleness of the tokens that are trained.

    `staleness/hist_<k>` is the fraction of trained tokens that are k versions old.
    """
    rewards = [np.array([t.reward for t in group.trajectories]) for group in plan.groups]
    lengths = [t.length - t.prompt_length for group in plan.groups for t in group.trajectories]
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
            "reward/zero_variance_groups": float(np.mean([group.std() == 0 for group in rewards])),
            "completion/length_mean": float(np.mean(lengths)),
        }
    headers = [trajectory for group in plan.groups for trajectory in group.trajectories]
    for name in sorted({name for trajectory in headers for name in trajectory.rewards}):
        known = [trajectory.rewards[name] for trajectory in headers if name in trajectory.rewards]
        row[f"rewards/{name}"] = float(np.mean(known))
    return row


def sample_rows(groups: Sequence[TrajectoryGroup], rows: int) -> list[dict[str, object]]:
    """The first completion of each group, then the second ...: at most `rows` rows for `samples.jsonl`."""
    depth = max((len(group.trajectories) for group in groups), default=0)
    places = [(group, i) for i in range(depth) for group in groups if i < len(group.trajectories)]
    return [
        {
            "group_id": group.group_id,
            "worker": group.worker,
            "prompt": group.prompt_text,
            "completion": group.completion_texts[i] if i < len(group.completion_texts) else "",
            "reward": group.trajectories[i].reward,
            "rewards": group.trajectories[i].rewards,
            "finish_reason": group.trajectories[i].finish_reason,
        }
        for group, i in places[:rows]
    ]
