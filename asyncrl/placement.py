"""Assigns the GPUs of one machine to processes: a pure function of what is there and what is wanted, without torch.

`dedicated`: the learner ranks take the first GPUs, one each; the engines take blocks of `tensor_parallel` GPUs after
them, and a reward service takes the last ones. No GPU is shared.

`colocated`: ranks and engines both begin at GPU 0. A GPU holds at most one rank, because two ranks on one GPU cannot
form an NCCL group, and as many engines as necessary. Its memory is split: `ENGINES_SHARE` for all its engines together,
`LEARNER_SHARE` for its rank.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    ranks_step: int = 1
    """The learner's parallel settings need a multiple of this many ranks."""
    engines: int = 0
    tensor_parallel: int = 1
    """GPUs per engine."""
    reserved: float = 0.0
    """GPUs that the user has Ray reserve for each engine; 0 leaves that to the placement."""
    rewards: float = 0.0
    """GPUs of each reward service."""
    reward_services: int = 1

    @property
    def width(self) -> int:
        """GPUs per engine. One for which Ray reserves more than it uses gets those, or it would wait forever."""
        return max(self.tensor_parallel, math.ceil(self.reserved))

    @property
    def engines_per_gpu(self) -> int:
        """Engines that Ray may put on one GPU; 0 if nothing was said about it."""
        return int(1 / self.reserved) if 0 < self.reserved <= 1 else 0

    @property
    def reward_gpus(self) -> int:
        """GPUs of all reward services, which share one with each other but not with an engine."""
        if self.rewards >= 1 or not self.rewards:
            return math.ceil(self.rewards) * self.reward_services
        return math.ceil(self.reward_services / int(1 / self.rewards))

    def engine_gpus(self, sharing: bool = False) -> int:
        """The fewest GPUs on which the engines fit. `sharing`: engines of one GPU may share it."""
        if self.width > 1 or not self.engines:
            return self.engines * self.width
        if self.engines_per_gpu:
            return math.ceil(self.engines / self.engines_per_gpu)
        return 1 if sharing else self.engines

    @property
    def pool_gpus(self) -> int:
        """The fewest GPUs on which a pool of workers fits whose engines may share them."""
        return self.engine_gpus(sharing=True) + self.reward_gpus

    def gpus(self, mode: str) -> int:
        """The fewest GPUs on which everything fits."""
        if mode == "colocated":
            return max(self.ranks, self.pool_gpus)
        return self.ranks + self.engine_gpus() + self.reward_gpus


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
    resolved = _resolved(gpus, demand, mode)
    if not fits(gpus, demand, resolved):
        wanted = f"placement.mode={resolved} needs {_sum(demand, resolved)} GPUs, but there are {gpus}"
        raise ConfigError(f"{wanted}{_why(demand, resolved)}. {_way_out(gpus, demand, mode)}")
    return _dedicated(demand) if resolved == "dedicated" else _colocated(gpus, demand)


def engine_share(gpus: int, demand: Demand) -> float:
    """GPUs per engine of a pool that has `gpus`: whole ones, or a fraction of one.

    Raises:
        ConfigError: engines and reward services do not fit.
    """
    if not fits(gpus, demand, "colocated"):
        wanted = f"this machine's rollouts need {_sum(demand, 'colocated')} GPUs, but there are {gpus}"
        raise ConfigError(f"{wanted}{_why(demand, 'colocated')}. {_way_out(gpus, demand, 'colocated')}")
    if demand.reserved:
        return demand.reserved
    room = gpus - demand.reward_gpus
    return float(demand.width) if room >= demand.engines * demand.width else 1 / math.ceil(demand.engines / room)


def blocks(gpus: int, engines: int, width: int = 1) -> list[tuple[int, ...]]:
    """GPU indices of each engine. Engines get their own while there are enough, then start over at GPU 0."""
    return [tuple((engine * width + part) % gpus for part in range(width)) for engine in range(engines)]


def fits(gpus: int, demand: Demand, mode: str) -> bool:
    return demand.gpus(_resolved(gpus, demand, mode)) <= gpus


def _resolved(gpus: int, demand: Demand, mode: str) -> str:
    if mode != "auto":
        return mode
    return "colocated" if demand.ranks and demand.engines and gpus == 1 else "dedicated"


def _sum(demand: Demand, mode: str) -> str:
    """The arithmetic, in the names of the settings."""
    if mode == "colocated" and demand.ranks > demand.pool_gpus:
        return f"one for each of learner.ranks={demand.ranks}, which is {demand.ranks}"
    parts = [f"learner.ranks={demand.ranks}"] if demand.ranks and mode == "dedicated" else []
    if demand.engines:
        wide = f" * {_width_settings(demand)[0]}={demand.width}" if demand.width > 1 else ""
        wide += f" / {demand.engines_per_gpu} (ray.gpus_per_worker)" if demand.engines_per_gpu > 1 else ""
        at_least = mode == "colocated" and demand.width == 1 and not demand.engines_per_gpu
        parts.append(
            f"1 for rollout.workers={demand.engines}" if at_least else f"rollout.workers={demand.engines}{wide}"
        )
    if demand.rewards:
        services = f" * {demand.reward_services} reward services" if demand.reward_services > 1 else ""
        parts.append(f"reward.gpus={demand.rewards:g}{services} in whole ones")
    return f"{' + '.join(parts)} = {demand.gpus(mode)}"


def _why(demand: Demand, mode: str) -> str:
    """The rule behind a sum that is not obvious."""
    if mode == "colocated" and demand.engines and demand.rewards:
        return ": a reward service shares no GPU with an engine"
    if mode == "colocated" and demand.width > 1:
        return ": engines that use several GPUs cannot share them with each other"
    return ""


def _width_settings(demand: Demand) -> list[str]:
    """The settings that give an engine several GPUs."""
    several = {"engine.tensor_parallel": demand.tensor_parallel, "ray.gpus_per_worker": demand.reserved}
    return [name for name, count in several.items() if count > 1]


def _way_out(gpus: int, demand: Demand, mode: str) -> str:
    found = nearest(gpus, demand, mode)
    ways = [_changes(demand, mode, *found)] if found else []
    if mode != "colocated" and demand.ranks and demand.engines and fits(gpus, demand, "colocated"):
        ways.append("placement.mode=colocated, where both share")
    for key, without in {"learner": replace(demand, ranks=0), "engine": replace(demand, engines=0)}.items():
        if without != demand and fits(gpus, without, mode):
            ways.append(f"{key}.device=cpu")
    return f"The nearest setting that fits: {', or '.join(dict.fromkeys(ways))}"


def _changes(demand: Demand, mode: str, found: Demand, found_mode: str) -> str:
    """The settings that make `found` of `demand`."""
    changed = [f"learner.ranks={found.ranks}"] if demand.ranks else []
    changed += [f"rollout.workers={found.engines}"] if demand.engines else []
    if found.width != demand.width:
        changed += [f"{name}={found.width}" for name in _width_settings(demand)]
    if found.rewards != demand.rewards:
        changed.append(f"reward.gpus={found.rewards:g}")
    if found_mode != mode:
        changed.append(f"placement.mode={found_mode}")
    if found.ranks % demand.ranks_step:
        changed.append("with parallel settings of the learner that divide its ranks")
    return " ".join(changed)


def nearest(gpus: int, demand: Demand, mode: str) -> tuple[Demand, str] | None:
    """The most similar layout that fits, and its mode. Given up in this order, only if nothing else fits: the ranks and
    engines (as many GPUs as possible are used, and their ratio kept), the width of engines, the GPUs of rewards, the
    mode, the step of the ranks."""
    modes = (mode, "colocated") if demand.ranks and demand.engines else (mode,)
    for step in (demand.ranks_step, 1):
        for each, rewards, width in itertools.product(modes, _fewer_rewards(demand), _smaller(demand.width)):
            kept = replace(demand, rewards=rewards, **_of_width(demand, width))
            if found := _most_similar(gpus, kept, step, each):
                return found, each
    return None


def _unused(gpus: int, demand: Demand, mode: str) -> tuple[int, int]:
    """GPUs that are not used, and those that ranks and engines could have had if they shared none."""
    if mode == "dedicated":
        return gpus - demand.gpus(mode), 0
    room = gpus - demand.reward_gpus
    engines = min(room, demand.engine_gpus() or 0)
    return gpus - max(demand.ranks, engines + demand.reward_gpus), 2 * gpus - demand.ranks - engines


def _ratio(demand: Demand) -> float:
    return demand.engines / max(1, demand.ranks)


def _fewer_rewards(demand: Demand) -> list[float]:
    whole = map(float, range(math.ceil(demand.rewards) - 1, -1, -1))
    return [demand.rewards, *whole]


def _smaller(width: int) -> list[int]:
    """Divisors: the heads of a model are not divided among any number of GPUs."""
    return [each for each in range(width, 0, -1) if width % each == 0]


def _of_width(demand: Demand, width: int) -> dict[str, Any]:
    reserved = float(width) if demand.reserved > 1 else demand.reserved
    return {"tensor_parallel": min(demand.tensor_parallel, width), "reserved": reserved}


def _most_similar(gpus: int, demand: Demand, step: int, mode: str) -> Demand | None:
    """The layout that is nearest to `demand`, of those that fit with as many ranks and engines or fewer."""
    wanted, resolved = _ratio(demand), _resolved(gpus, demand, mode)
    most = min(demand.engines, gpus * max(1, demand.engines_per_gpu))
    fewer = range(min(1, demand.engines), most + 1)
    counts = fewer if most == demand.engines else [*fewer, demand.engines]
    found: list[Demand] = []
    for ranks in range(step, min(demand.ranks, gpus) + 1, step) if demand.ranks else (0,):
        fitting = bisect_left(
            counts, True, key=lambda n, r=ranks: not fits(gpus, replace(demand, ranks=r, engines=n), mode)
        )
        if not fitting:
            break
        found += _best_of(gpus, replace(demand, ranks=ranks), counts[:fitting], resolved, wanted)
    return min(found, key=lambda one: (*_unused(gpus, one, resolved), abs(_ratio(one) - wanted)), default=None)


def _best_of(gpus: int, demand: Demand, counts: Sequence[int], mode: str, wanted: float) -> list[Demand]:
    """Layouts with these ranks, one of which is the nearest with a number of engines out of `counts`. The more engines,
    the fewer GPUs are not used: it is at the end, among those that leave as few as the last."""

    def unused(engines: int) -> tuple[int, int]:
        return _unused(gpus, replace(demand, engines=engines), mode)

    first = bisect_left(counts, True, key=lambda engines: unused(engines) == unused(counts[-1]))
    near = bisect_left(counts, wanted * max(1, demand.ranks), lo=first)
    return [replace(demand, engines=engines) for engines in counts[max(first, near - 1) : near + 1]]


def _dedicated(demand: Demand) -> Placement:
    behind = demand.ranks + demand.engine_gpus()
    taken = blocks(max(1, demand.engine_gpus()), demand.engines, demand.width)
    memory = WHOLE_SHARE / max(1, demand.engines_per_gpu)
    return Placement(
        mode="dedicated",
        learner=tuple(_rank(number, WHOLE_SHARE) for number in range(demand.ranks)),
        engines=tuple(
            _engine(number, tuple(demand.ranks + gpu for gpu in block), memory) for number, block in enumerate(taken)
        ),
        rewards=_rewards(demand, behind),
    )


def _colocated(gpus: int, demand: Demand) -> Placement:
    """Ray decides which of the pool's GPUs an engine or a reward service is on, so that the memory is right for each:
    every rank there has a neighbour, and every engine has as many as it can have."""
    room = gpus - demand.reward_gpus
    taken = min(room, demand.engine_gpus()) if demand.engines else 0
    pool = taken + demand.reward_gpus
    crowd = demand.engines_per_gpu or (math.ceil(demand.engines * demand.width / taken) if taken else 1)
    memory = (ENGINES_SHARE if demand.ranks else WHOLE_SHARE) / crowd
    return Placement(
        mode="colocated",
        learner=tuple(_rank(gpu, LEARNER_SHARE if gpu < pool else WHOLE_SHARE) for gpu in range(demand.ranks)),
        engines=tuple(
            _engine(number, block, memory)
            for number, block in enumerate(blocks(max(1, taken), demand.engines, demand.width))
        ),
        rewards=_rewards(demand, taken),
    )


def _rank(number: int, memory: float) -> Placed:
    return Placed(name=f"learner rank {number}", gpus=(number,), memory=memory)


def _engine(number: int, gpus: tuple[int, ...], memory: float) -> Placed:
    return Placed(name=f"rollout worker {number}", gpus=gpus, memory=memory)


def _rewards(demand: Demand, first: int) -> tuple[Placed, ...]:
    # Nothing bounds the memory of a user's reward model, so its share is not known.
    gpus = tuple(range(first, first + demand.reward_gpus))
    return (Placed(name="reward service", gpus=gpus, memory=0.0),) if demand.rewards else ()
