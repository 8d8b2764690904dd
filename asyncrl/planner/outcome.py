"""The result of a simulated run, in terms of the metrics of a real one."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from asyncrl.planner.costs import Costs
from asyncrl.planner.simulation import Setup, Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Metrics by which a run, real or simulated, is judged, over the steps after its warm-up."""

    step_s: float
    tokens_per_s: float
    """Loss tokens trained per second."""
    learner_idle: float
    """Share of the time in which the learner waited for a batch."""
    rollout_idle: float
    """Share of the time in which a worker had no group, averaged over the workers."""
    staleness_mean: float
    """Mean staleness of the trained tokens, in versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Measured):
    """The result of a simulation."""

    staleness_max: int
    staleness: dict[int, float]
    """Share of the trained tokens by staleness."""
    goodput: float
    """Tokens trained over tokens sampled, of groups whose fate is known, since the start of the run."""

    def as_object(self) -> dict[str, object]:
        return asdict(self)


def simulate(setup: Setup, costs: Costs, *, steps: int, warm_up: int, seed: int = 0) -> Outcome:
    """Raises ConfigError if the settings deadlock."""
    simulation = Simulation(setup, costs, seed)
    simulation.run(warm_up)
    before = simulation.held_s, simulation.now
    simulation.run(steps)
    return outcome_of(simulation, warm_up, before)


def outcome_of(simulation: Simulation, warm_up: int, before: tuple[float, float]) -> Outcome:
    """Compute the outcome of a simulated run.

    Args:
        before: `held_s` and the clock at the end of the warm-up.
    """
    steps = simulation.steps[warm_up:]
    began = simulation.steps[warm_up - 1].ended if warm_up else 0.0
    seconds = max(steps[-1].ended - began, 1e-12)
    ages: dict[int, int] = {}
    for step in steps:
        for age, count in step.tokens.items():
            ages[age] = ages.get(age, 0) + count
    tokens = max(1, sum(ages.values()))
    held, clock = simulation.held_s - before[0], max(simulation.now - before[1], 1e-12)
    goodput = simulation.core.meter.goodput(simulation.core.workers)
    return Outcome(
        step_s=seconds / len(steps),
        tokens_per_s=tokens / seconds,
        learner_idle=min(1.0, sum(step.waited for step in steps) / seconds),
        rollout_idle=max(0.0, 1 - held / (clock * len(simulation.engines))),
        staleness_mean=sum(age * count for age, count in ages.items()) / tokens,
        staleness_max=max(ages, default=0),
        staleness={age: count / tokens for age, count in sorted(ages.items())},
        goodput=goodput.get("goodput/share", 1.0),
    )
