"""What a simulated run came to, in the words of the metrics of a real one."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from asyncrl.planner.costs import Costs
from asyncrl.planner.simulation import Setup, Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of the steps after the warm-up, but for `goodput`."""

    step_s: float
    tokens_per_s: float
    """Loss tokens trained."""
    groups_per_s: float
    learner_idle: float
    """Share of the time that the learner waited for a batch."""
    rollout_idle: float
    """Share of the time that an engine had no sequence, mean over the engines."""
    staleness_mean: float
    """Of the tokens trained, in versions."""
    staleness_max: int
    staleness: dict[int, float]
    """Share of the trained tokens by age."""
    goodput: float
    """Tokens trained over tokens sampled of the groups whose fate is known, since the start of the run."""
    in_flight: float
    """Groups, where the simulation ended."""

    def as_object(self) -> dict[str, object]:
        return asdict(self)


def simulate(setup: Setup, costs: Costs, *, steps: int, warm_up: int, seed: int = 0) -> Outcome:
    """Raises ConfigError when the settings lock each other out."""
    simulation = Simulation(setup, costs, seed)
    simulation.run(warm_up)
    before = busy_of(simulation), simulation.now
    simulation.run(steps)
    return outcome_of(simulation, warm_up, busy_before=before)


def busy_of(simulation: Simulation) -> float:
    """Seconds in which engines had a sequence, all together."""
    for engine in simulation.engines.values():
        engine.advance(simulation.now)
    return sum(engine.busy_s for engine in simulation.engines.values())


def outcome_of(simulation: Simulation, warm_up: int, busy_before: tuple[float, float] = (0.0, 0.0)) -> Outcome:
    """Args:
    busy_before: `busy_of` and the clock at the end of the warm-up.
    """
    steps = simulation.steps[warm_up:]
    began = simulation.steps[warm_up - 1].ended if warm_up else 0.0
    seconds = max(steps[-1].ended - began, 1e-12)
    ages: dict[int, int] = {}
    for step in steps:
        for age, count in step.tokens.items():
            ages[age] = ages.get(age, 0) + count
    tokens = max(1, sum(ages.values()))
    busy, clock = busy_of(simulation) - busy_before[0], max(simulation.now - busy_before[1], 1e-12)
    goodput = simulation.core.meter.goodput(simulation.core.workers)
    return Outcome(
        step_s=seconds / len(steps),
        tokens_per_s=tokens / seconds,
        groups_per_s=len(steps) * simulation.setup.settings.groups_per_step / seconds,
        learner_idle=min(1.0, sum(step.waited for step in steps) / seconds),
        rollout_idle=max(0.0, 1 - busy / (clock * len(simulation.engines))),
        staleness_mean=sum(age * count for age, count in ages.items()) / tokens,
        staleness_max=max(ages, default=0),
        staleness={age: count / tokens for age, count in sorted(ages.items())},
        goodput=goodput.get("goodput/share", 1.0),
        in_flight=float(simulation.core.state.in_flight),
    )
