"""A replay that serves batches fixed in advance, a publisher that keeps the weights, and a log that keeps its rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from asyncrl.errors import NoProgress
from asyncrl.evaluation.orders import EvalSummary
from asyncrl.replay.protocol import Lease, Member, Restored, TrainedReply
from asyncrl.telemetry.metrics.evaluations import is_evaluation
from asyncrl.weights.base import PublishStats
from asyncrl.weights.canary import Canary
from tests.learner.feed import make_lease, make_step


class FedReplay:
    """A replay whose step k is always `make_step(seed + k)`. It keeps the calls in `calls`."""

    def __init__(self, *, seed: int = 0, groups: int = 4, size: int = 4, steps: int = 1000) -> None:
        self._seed, self._groups, self._size, self._steps = seed, groups, size, steps
        self.calls: list[tuple[str, Any]] = []
        self.next_step = 0
        self.next_version = 0
        self.evaluations: list[EvalSummary] = []
        self.sets: list[tuple[int, str, int, int]] = []
        """Evaluations asked for: step, set, rows, chunk."""
        self.poisoned: set[int] = set()
        """Steps whose rewards are NaN."""

    def named(self, call: str) -> list[Any]:
        return [argument for name, argument in self.calls if name == call]

    def restore(
        self,
        *,
        step: int | None,
        policy_version: int,
        snapshot: dict[str, Any] | None,
        settings: str = "",
        branch: bool = False,
        run: str = "",
    ) -> Restored:
        self.calls.append(("restore", (step, policy_version, snapshot)))
        self.next_step = 0 if step is None else step + 1
        return Restored(next_step=self.next_step, next_version=self.next_version)

    def publish(self, *, policy_version: int, parent: int) -> None:
        self.calls.append(("publish", (policy_version, parent)))
        self.next_version = policy_version + 1

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        self.calls.append(("lease", step))
        if step >= self._steps:
            time.sleep(wait_s)
            raise NoProgress(f"no group arrived within {wait_s} s; waited for rollout workers: none")
        plan, groups = make_step(self._seed + step, groups=self._groups, size=self._size, world=world, step=step)
        if step in self.poisoned:
            headers = [
                replace(g, trajectories=tuple(replace(t, reward=float("nan")) for t in g.trajectories))
                for g in plan.groups
            ]
            plan = replace(plan, groups=tuple(headers))
        return make_lease(plan, groups, rank, samples=2 if rank == 0 else 0)

    def trained(self, *, step: int, policy_version: int) -> TrainedReply:
        self.calls.append(("trained", (step, policy_version)))
        self.next_version = policy_version + 1
        done, self.evaluations = tuple(self.evaluations), []
        return TrainedReply(metrics={"replay/trained": float(step + 1)}, evaluations=done)

    def commit(self, *, step: int) -> None:
        self.calls.append(("commit", step))

    def snapshot(self) -> dict[str, Any]:
        return {"step": len(self.named("trained")) - 1, "tree": {3: 2}}

    def evaluate(self, *, step: int, policy_version: int, eval_set: str, rows: int, chunk: int) -> int:
        self.calls.append(("evaluate", (step, policy_version)))
        self.sets.append((step, eval_set, rows, chunk))
        summary = EvalSummary(
            job_id=step,
            step=step,
            policy_version=policy_version,
            eval_set=eval_set,
            mean=0.5,
            low=0.25,
            high=0.75,
            count=rows,
            failed=0,
            version_min=policy_version,
            version_max=policy_version,
            superseded=0,
        )
        self.evaluations.append(summary)
        return step

    def wait_evaluations(self, *, wait_s: float) -> tuple[EvalSummary, ...]:
        done, self.evaluations = tuple(self.evaluations), []
        return done

    def announce(self, values: dict[str, Any]) -> None:
        self.calls.append(("announce", values))

    def members(self) -> list[Member]:
        return []

    def finish(self) -> None:
        self.calls.append(("finish", None))

    def close(self) -> None:
        self.calls.append(("close", None))


class KeptWeights:
    """A publisher that keeps the first and the newest full tensors."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.first: dict[str, torch.Tensor] = {}
        self.newest: dict[str, torch.Tensor] = {}
        self.failed: bool | None = None

    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]], canary: Canary | None = None
    ) -> PublishStats:
        self.newest = {
            # The tensor may be in host memory; gather it on the device of its mesh.
            name: (
                tensor.to(tensor.device_mesh.device_type).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
                if isinstance(tensor, DTensor)
                else tensor
            ).clone()
            for name, tensor in tensors
        }
        self.first = self.first or self.newest
        self.versions.append(policy_version)
        return PublishStats(wait_previous_s=0.0, nbytes=sum(t.nbytes for t in self.newest.values()))

    meets = False

    def wait_sent(self) -> float:
        return self.wait()

    def wait(self) -> float:
        return 0.0

    def serve(self) -> None:
        return

    def stats(self) -> dict[str, float]:
        return {"weights/engines": 1.0, "weights/gather_s": 0.0}

    def close(self, *, failed: bool = False) -> None:
        self.failed = failed


class KeptRows:
    """A log that keeps rows in memory."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.sampled: list[Mapping[str, Any]] = []
        self.binned: list[Mapping[str, tuple[list[float], list[float]]]] = []

    def write(self, step: int, policy_version: int, row: Mapping[str, float]) -> None:
        kept = self.evaluations if is_evaluation(row) else self.rows
        kept.append({"step": step, "policy_version": policy_version, **row})

    def close(self) -> None:
        return

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], eval_set: str = "") -> None:
        if not eval_set:
            self.sampled += rows

    def histograms(self, step: int, found: Mapping[str, tuple[list[float], list[float]]]) -> None:
        self.binned.append(found)


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name].numpy() - other[name].numpy()).max()) for name in one)
