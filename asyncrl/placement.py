"""Assigns the GPUs of one machine to processes: a pure function of what is there and what is wanted, without torch.

`dedicated`: the learner ranks take the first GPUs, one each; the engines take blocks of `tensor_parallel` GPUs after
them, and a reward service takes the last ones. No GPU is shared.

`colocated`: ranks and engines both begin at GPU 0. A GPU holds at most one rank, because two ranks on one GPU cannot
form an NCCL group, and as many engines as necessary. Its memory is split: `ENGINES_SHARE` for all its engines together,
`LEARNER_SHARE` for its rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from asyncrl.errors import ConfigError

ENGINES_SHARE, LEARNER_SHARE, WHOLE_SHARE = 0.45, 0.45, 0.9
"""Shares of a GPU's memory: for all engines on it, for the rank beside them, and for either alone. The rest covers what
processes allocate outside of their own accounting (CUDA context, NCCL buffers)."""
MODES = ("auto", "dedicated", "colocated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run wants from the GPUs of one machine. Processes on the CPU or on other machines count 0."""

    ranks: int = 0
    """Learner ranks, one GPU each."""
    engines: int = 0
    tensor_parallel: int = 1
    """GPUs per engine."""
    engines_per_gpu: int = 1
    """Engines that share a GPU on purpose, for `dedicated`; `colocated` derives it from the GPUs there are."""
    rewards: float = 0.0
    """GPUs of a reward service."""

    @property
    def gpus(self) -> int:
        """GPUs needed if none is shared between learner, engines and rewards."""
        return self.ranks + self.engine_gpus + math.ceil(self.rewards)

    @property
    def engine_gpus(self) -> int:
        return math.ceil(self.engines / self.engines_per_gpu) * self.tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One process, or the processes of one engine."""

    name: str
    gpus: tuple[int, ...]
    """Their indices among the GPUs that can be assigned."""
    memory: float
    """Share of each GPU's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    mode: str
    """`dedicated` or `colocated`."""
    learner: tuple[Placed, ...] = ()
    engines: tuple[Placed, ...] = ()
    rewards: tuple[Placed, ...] = ()

    @property
    def learner_gpus(self) -> tuple[int, ...]:
        """GPUs of the learner, in the order of its ranks."""
        return tuple(gpu for rank in self.learner for gpu in rank.gpus)

    @property
    def rollout_gpus(self) -> tuple[int, ...]:
        """GPUs of the rollout pool (engines and reward service), each once."""
        return tuple(dict.fromkeys(gpu for placed in (*self.engines, *self.rewards) for gpu in placed.gpus))

    @property
    def shared(self) -> bool:
        """Whether some GPU holds both a rank and an engine."""
        return bool(set(self.learner_gpus) & set(self.rollout_gpus))

    @property
    def engine_memory(self) -> float:
        """Share of a GPU's memory that every engine may take."""
        return min((engine.memory for engine in self.engines), default=WHOLE_SHARE)

    def __iter__(self) -> Iterator[Placed]:
        return iter((*self.learner, *self.engines, *self.rewards))


def place(gpus: int, demand: Demand, mode: str = "auto") -> Placement:
    """Place every process of `demand` on `gpus` GPUs. `auto` is `colocated` if learner and engines want the same single
    GPU, else `dedicated`.

    Raises:
        ConfigError: they do not fit. It shows the arithmetic and the nearest layout that fits.
    """
    both = demand.ranks > 0 and demand.engines > 0
    if mode == "auto":
        mode = "colocated" if both and gpus == 1 else "dedicated"
    problem = _problem(gpus, demand, mode)
    if problem:
        raise ConfigError(f"{problem}. {_way_out(gpus, demand, mode)}")
    return _dedicated(demand) if mode == "dedicated" else _colocated(gpus, demand)


def engine_share(gpus: int, engines: int, tensor_parallel: int = 1) -> float:
    """GPUs per engine if `engines` have `gpus` among themselves: whole ones, or a fraction of one.

    Raises:
        ConfigError: an engine that spans several GPUs would have to share them.
    """
    if gpus >= engines * tensor_parallel:
        return float(tensor_parallel)
    alone = Demand(engines=engines, tensor_parallel=tensor_parallel)
    problem = _too_crowded(gpus, alone)
    if problem:
        raise ConfigError(f"{problem}. {_way_out(gpus, alone, '')}")
    return 1 / math.ceil(engines / gpus)


def blocks(gpus: int, engines: int, tensor_parallel: int = 1) -> list[tuple[int, ...]]:
    """GPU indices of each engine. Engines get their own while there are enough, then start over at GPU 0."""
    return [
        tuple((engine * tensor_parallel + part) % gpus for part in range(tensor_parallel)) for engine in range(engines)
    ]


def _problem(gpus: int, demand: Demand, mode: str) -> str:
    """Why this does not fit; empty if it does."""
    if mode == "dedicated":
        if demand.gpus <= gpus:
            return ""
        return f"placement.mode=dedicated needs {_sum(demand)} = {demand.gpus} GPUs, but there are {gpus}"
    if demand.ranks > gpus:
        return f"placement.mode=colocated needs a GPU for each of learner.ranks={demand.ranks}, but there are {gpus}"
    problem = _too_crowded(gpus, demand)
    if problem or not demand.rewards:
        return problem
    taken = demand.engines * engine_share(gpus, demand.engines, demand.tensor_parallel)
    if taken + demand.rewards <= gpus:
        return ""
    return (
        f"reward.gpus={demand.rewards:g} of {gpus}, but the engines take {taken:g} of them: none is left for the "
        "reward service, which cannot share a GPU with an engine"
    )


def _too_crowded(gpus: int, demand: Demand) -> str:
    wide = demand.engines * demand.tensor_parallel
    if demand.engines and demand.tensor_parallel > 1 and wide > gpus:
        return (
            f"rollout.workers={demand.engines} * engine.tensor_parallel={demand.tensor_parallel} = {wide} GPUs, but "
            f"there are {gpus}: engines that use several GPUs cannot share them with each other"
        )
    if demand.engines and not gpus:
        return f"rollout.workers={demand.engines} engines need GPUs, but there are 0"
    return ""


def _sum(demand: Demand) -> str:
    parts = [f"learner.ranks={demand.ranks}"] if demand.ranks else []
    if demand.engines:
        wide = f" * engine.tensor_parallel={demand.tensor_parallel}" if demand.tensor_parallel > 1 else ""
        wide += f" / {demand.engines_per_gpu} (ray.gpus_per_worker)" if demand.engines_per_gpu > 1 else ""
        parts.append(f"rollout.workers={demand.engines}{wide}")
    if demand.rewards:
        parts.append(f"reward.gpus={demand.rewards:g} in whole ones")
    return " + ".join(parts)


def _way_out(gpus: int, demand: Demand, mode: str) -> str:
    found = nearest(gpus, demand, mode or "dedicated")
    ways = []
    if found is not None:
        settings = [f"learner.ranks={found.ranks}"] if demand.ranks else []
        settings += [f"rollout.workers={found.engines}"] if demand.engines else []
        wide = found.tensor_parallel != demand.tensor_parallel
        ways.append(" ".join([*settings, *([f"engine.tensor_parallel={found.tensor_parallel}"] if wide else [])]))
    if mode == "dedicated" and gpus and demand.ranks and demand.engines and not _problem(gpus, demand, "colocated"):
        ways.append("placement.mode=colocated, where both share")
    ways.append("learner.device=cpu or engine.device=cpu" if mode else "engine.device=cpu")
    return f"The nearest setting that fits: {', or '.join(ways)}"


def nearest(gpus: int, demand: Demand, mode: str) -> Demand | None:
    """The most similar layout that fits: `tensor_parallel` is kept if possible, then as many GPUs as possible are used,
    then the ratio of engines to ranks is as close as possible."""
    for width in range(demand.tensor_parallel, 0, -1):
        tries = [
            replace(demand, ranks=ranks, engines=engines, tensor_parallel=width)
            for ranks in range(min(1, demand.ranks), min(demand.ranks, gpus) + 1)
            for engines in range(min(1, demand.engines), min(demand.engines, max(1, gpus)) + 1)
        ]
        fitting = [each for each in tries if not _problem(gpus, each, mode)]
        if fitting:
            wanted = demand.engines / max(1, demand.ranks)
            return min(fitting, key=lambda each: (-each.gpus, abs(each.engines / max(1, each.ranks) - wanted)))
    return None


def _dedicated(demand: Demand) -> Placement:
    behind, width = demand.ranks + demand.engine_gpus, demand.tensor_parallel
    taken = blocks(max(1, demand.engine_gpus), demand.engines, width)
    return Placement(
        mode="dedicated",
        learner=tuple(_rank(number, WHOLE_SHARE) for number in range(demand.ranks)),
        engines=tuple(
            _engine(number, tuple(demand.ranks + gpu for gpu in block), WHOLE_SHARE / demand.engines_per_gpu)
            for number, block in enumerate(taken)
        ),
        rewards=_rewards(demand, tuple(range(behind, demand.gpus))),
    )


def _colocated(gpus: int, demand: Demand) -> Placement:
    taken = blocks(max(1, gpus), demand.engines, demand.tensor_parallel)
    crowd = [sum(gpu in block for block in taken) for gpu in range(gpus)]

    def share(block: tuple[int, ...]) -> float:
        room = ENGINES_SHARE if any(gpu < demand.ranks for gpu in block) else WHOLE_SHARE
        return room / max(crowd[gpu] for gpu in block)

    return Placement(
        mode="colocated",
        learner=tuple(_rank(gpu, LEARNER_SHARE if crowd[gpu] else WHOLE_SHARE) for gpu in range(demand.ranks)),
        engines=tuple(_engine(number, block, share(block)) for number, block in enumerate(taken)),
        rewards=_rewards(demand, tuple(range(gpus))),
    )


def _rank(number: int, memory: float) -> Placed:
    return Placed(name=f"learner rank {number}", gpus=(number,), memory=memory)


def _engine(number: int, gpus: tuple[int, ...], memory: float) -> Placed:
    return Placed(name=f"rollout worker {number}", gpus=gpus, memory=memory)


def _rewards(demand: Demand, gpus: tuple[int, ...]) -> tuple[Placed, ...]:
    # Nothing bounds the memory of a user's reward model, so its share is not known.
    return (Placed(name="reward service", gpus=gpus, memory=0.0),) if demand.rewards else ()
