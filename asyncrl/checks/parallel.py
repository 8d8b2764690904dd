"""The layout by which the ranks of a learner share the work. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.checks.problem import Problems, divisors
from asyncrl.schema import LearnerSettings

REPLICATE, SHARD, EXPERT, TENSOR = "replicate", "shard", "expert", "tensor"
"""Dimensions of the device mesh, in order: the ranks of the last one are neighbours on a machine."""
LAID_OUT_BY = ("replicas", "sequence_parallel", "expert_parallel", "tensor_parallel")
"""Settings of the learner that determine the layout of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """The number of ranks along each dimension."""

    replicate: int = 1
    """Copies of the sharded model, whose gradients are reduced after those of their shards (HSDP)."""
    shard: int = 1
    """Ranks with different sequences that shard one copy (FSDP2); in all, `shard * sequence` ranks shard it."""
    sequence: int = 1
    """Ranks that share the tokens of every pack, and shard the model like the others."""
    expert: int = 1
    """Number of neighbours, among the ranks that shard a copy, that hold different experts and exchange tokens."""
    tensor: int = 1
    """Ranks that compute every layer together."""

    @classmethod
    def of(cls, learner: LearnerSettings, ranks: int) -> ParallelDims:
        """Return the layout of `ranks` by settings that have passed `problem_of`."""
        copies, sequence, tensor = learner.replicas, learner.sequence_parallel, learner.tensor_parallel
        shard = ranks // (copies * sequence * tensor)
        return cls(replicate=copies, shard=shard, sequence=sequence, expert=learner.expert_parallel, tensor=tensor)

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor

    @property
    def shards(self) -> int:
        """Number of parts into which FSDP2 shards one copy."""
        return self.shard * self.sequence

    @property
    def data(self) -> int:
        """Number of ranks that train on different sequences."""
        return self.replicate * self.shard

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each dimension that is used; always with `shard`."""
        shards = self.shards // self.expert
        sizes = {REPLICATE: self.replicate, SHARD: shards, EXPERT: self.expert, TENSOR: self.tensor}
        return {name: size for name, size in sizes.items() if size > 1 or name == SHARD}

    def __str__(self) -> str:
        copies = f"{self.replicate} copies of the model (HSDP), each sharded over " if self.replicate > 1 else ""
        apart = f", of which {self.sequence} share every pack" if self.sequence > 1 else ""
        experts = f", experts spread over {self.expert} of them" if self.expert > 1 else ""
        together = f", tensor parallel over {self.tensor}: {self.ranks} in all" if self.tensor > 1 else ""
        return f"{copies or 'FSDP2 over '}{self.shards} rank(s){apart}{experts}{together}"

    def data_rank(self, rank: int) -> int:
        """Return the index of a rank in the `data` dimension: ranks with the same sequences are neighbours."""
        return rank // (self.sequence * self.tensor)


def ranks_step(learner: LearnerSettings) -> int:
    """Return what the number of ranks must be a multiple of."""
    shards = math.lcm(learner.sequence_parallel, learner.expert_parallel)
    return learner.replicas * learner.tensor_parallel * shards


def problem_of(learner: LearnerSettings, ranks: int, said: str = "learner.ranks") -> str:
    """Return why `ranks` cannot be laid out like this; empty if they can.

    Args:
        said: name of the setting with the number of ranks.
    """
    sizes = {
        "learner.replicas": learner.replicas,
        "learner.sequence_parallel": learner.sequence_parallel,
        "learner.tensor_parallel": learner.tensor_parallel,
    }
    product = math.prod(sizes.values())
    if min(*sizes.values(), learner.expert_parallel, ranks) < 1:
        return ""  # refused by numbers_in_range
    if ranks % product == 0:
        return _experts_problem(learner, ranks, said)
    wanted = {key: size for key, size in sizes.items() if size > 1}
    key, size = next(iter(wanted.items()))
    rest = product // size
    fits = ", ".join(map(str, divisors(ranks // rest) if ranks % rest == 0 else ()))
    way = f"{key} to one of {fits}, or " if fits else ""
    factors = " * ".join(f"{name}={count}" for name, count in wanted.items())
    return (
        f"{said}={ranks} must be a multiple of {factors}: the ranks that remain shard each copy of the model. Set "
        f"{way}another number of ranks"
    )


def _experts_problem(learner: LearnerSettings, ranks: int, said: str) -> str:
    shards = ranks // (learner.replicas * learner.tensor_parallel)
    if shards % learner.expert_parallel == 0:
        return ""
    fits = map(str, divisors(shards))
    each = f", {shards} to a copy of the model," if shards < ranks else ""
    return (
        f"learner.expert_parallel={learner.expert_parallel} must divide the ranks over which FSDP2 shards the model "
        f"({said}={ranks}{each}), because they spread the experts between them. Set it to one of {', '.join(fits)}"
    )


def ranks_divide(learner: LearnerSettings, ranks: int, started: bool = False) -> Problems:
    """Check that `ranks` can be laid out.

    Args:
        started: this number of ranks is started. Otherwise, with `learner.ranks` left at 1, a user's own torchrun may
            start any number.
    """
    problem = problem_of(learner, ranks) if started or ranks > 1 else ""
    if problem:
        yield problem


def proven_with(key: str, ranks: int, unproven: Mapping[str, bool]) -> Problems:
    """Refuse combinations that were not tested.

    Args:
        key, ranks: a setting by which several ranks share a computation, and its value.
        unproven: description of what was not tested with it -> whether it is requested.
    """
    for what, wanted in unproven.items():
        if ranks > 1 and wanted:
            yield f"{key}={ranks} was not tested with {what}. Set {key}=1"
