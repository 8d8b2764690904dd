"""How the ranks of a learner share the work: one layout, resolved once. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from asyncrl.checks.problem import Problems

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
"""Dimensions of the mesh of ranks, in its order: the last one's ranks are neighbours on a machine."""


class Layout(Protocol):
    """The settings that say it: `learner` of a run, and of `asyncrl sft`."""

    replicas: int
    tensor_parallel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Ranks along each dimension."""

    replicate: int = 1
    """Copies of the sharded model, whose gradients meet after those of their shards (HSDP)."""
    shard: int = 1
    """Ranks that cut one copy into parts (FSDP2)."""
    tensor: int = 1
    """Ranks that compute every layer together."""

    @classmethod
    def of(cls, learner: Layout, ranks: int) -> ParallelDims:
        """What `ranks` make of the settings, which `problem_of` has passed."""
        tensor = learner.tensor_parallel
        return cls(replicate=learner.replicas, shard=ranks // (learner.replicas * tensor), tensor=tensor)

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """Ranks that train on different sequences."""
        return self.replicate * self.shard

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each dimension that there is; `shard` in any case."""
        sizes = {REPLICATE: self.replicate, SHARD: self.shard, TENSOR: self.tensor}
        return {name: size for name, size in sizes.items() if size > 1 or name == SHARD}

    def __str__(self) -> str:
        copies = f"{self.replicate} copies of the model (HSDP), each sharded over " if self.replicate > 1 else ""
        together = f", tensor parallel over {self.tensor}: {self.ranks} in all" if self.tensor > 1 else ""
        return f"{copies or 'FSDP2 over '}{self.shard} rank(s){together}"

    def data_rank(self, rank: int) -> int:
        """Of a rank among `data`: those of one `tensor` group are neighbours, and have the same sequences."""
        return rank // self.tensor


def problem_of(learner: Layout, ranks: int, said: str = "learner.ranks") -> str:
    """Why `ranks` cannot be laid out so; empty if they can.

    Args:
        said: where the number of ranks comes from.
    """
    copies, tensor = learner.replicas, learner.tensor_parallel
    if min(copies, tensor, ranks) < 1 or ranks % (copies * tensor) == 0:
        return ""  # the first is refused by numbers_in_range
    key, other = ("replicas", tensor) if copies > 1 else ("tensor_parallel", copies)
    fits = [str(n) for n in range(1, ranks + 1) if ranks % (n * other) == 0]
    way = f"learner.{key} to one of {', '.join(fits)}, or " if fits else ""
    return (
        f"{said}={ranks} cannot be learner.replicas={copies} * learner.tensor_parallel={tensor} * equally many ranks "
        f"that shard. Set {way}another number of ranks"
    )


def ranks_divide(learner: Layout, ranks: int) -> Problems:
    if problem := problem_of(learner, ranks):
        yield problem


def proven_with(learner: Layout, unproven: Mapping[str, bool]) -> Problems:
    """Args: unproven: what tensor parallelism has not been tried with, in words -> whether it is wanted."""
    for what, wanted in unproven.items():
        if learner.tensor_parallel > 1 and wanted:
            yield (
                f"learner.tensor_parallel={learner.tensor_parallel} is not proven with {what}. Set "
                "learner.tensor_parallel=1"
            )
