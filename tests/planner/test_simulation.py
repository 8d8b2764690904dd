"""The simulated run against arithmetic by hand, and against a slower simulation of the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.planner.costs import Costs, Decode, Histogram, LogNormal
from asyncrl.planner.engine import Making, Member, SimulatedEngine
from asyncrl.planner.outcome import simulate
from asyncrl.planner.simulation import Setup, Simulation, in_turns
from asyncrl.replay.core.admission import AdmissionSettings

FIXED = Histogram((100, 101), (1,))
"""Every completion has 100 tokens."""


def settings(depth: int, **changed: object) -> AdmissionSettings:
    numbers = {"groups_per_step": 4, "group_size": 2, "max_staleness": 8, "max_in_flight": 64}
    return AdmissionSettings(**(numbers | {"pipeline_depth": depth} | changed))  # type: ignore[arg-type]


def setup(depth: int, *, engines: int = 1, max_sequences: int = 64, ranks: int = 1, **changed: object) -> Setup:
    return Setup(
        settings=settings(depth, **changed), engines=engines, slots=32, max_sequences=max_sequences, ranks=ranks
    )


def costs(**changed: object) -> Costs:
    return Costs(**({"decode": Decode(((1, 0.01),)), "lengths": FIXED, "step_s": 0.5} | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("by_sample", [False, True])
def test_without_depth_the_phases_of_a_step_add_up(by_sample: bool) -> None:
    told = costs(prefill_s=0.2, environment_s=0.3, deliver_s=0.1, sync_s=0.4, token_s=0.001)
    found = simulate(setup(0, max_staleness=0, ranks=2, by_sample=by_sample), told, steps=20, warm_up=5)
    generated, trained, tokens = 0.2 + 100 * 0.01 + 0.3, 0.5 + 0.001 * 800 / 2, 4 * 2 * 100
    # A step's weights are served before the next group may begin: staleness is 0. Its order comes after `deliver_s`.
    assert found.step_s == pytest.approx(0.4 + 0.1 + generated + trained)
    assert found.learner_idle == pytest.approx(1 - trained / found.step_s)
    assert found.tokens_per_s == pytest.approx(tokens / found.step_s)
    assert found.staleness == {0: 1.0}
    assert found.goodput == 1.0
    # The worker has the group until it knows that it is inserted, while the learner trains.
    assert found.rollout_idle == pytest.approx(1 - (generated + 0.1) / found.step_s)


def test_prompts_stop_an_engine_and_bring_first_tokens_and_a_worker_handles_one_group_after_the_other() -> None:
    told = costs(prompts=Decode(((1, 0.2), (4, 0.5))), handle_s=0.3, deliver_s=0.1)
    found = simulate(setup(0, max_staleness=0), told, steps=20, warm_up=5)
    # The 4 groups of a step come together, and all their sequences end together.
    generated = 0.5 + 99 * 0.01 + 4 * 0.3 + 0.1
    assert found.step_s == pytest.approx(generated + 0.5)
    assert found.tokens_per_s == pytest.approx(4 * 2 * 100 / found.step_s)
    assert found.goodput == 1.0


def test_a_first_token_is_of_the_version_that_was_served_when_its_prefill_began() -> None:
    engine, group = SimulatedEngine("w", 4, [0.01, 0.01, 0.01], 0, Decode(((1, 0.5),))), Making(None, 2)
    engine.prefill(1, 0.0)
    engine.add(Member(group, [4]), 0.0)
    assert engine.next_end() == pytest.approx(0.5 + 3 * 0.01)
    engine.load(1, 0.52, 0.0)  # after the prefill and two steps
    engine.prefill(1, 0.52)
    engine.add(Member(group, [2]), 0.52)
    assert len(engine.ended(1.03)) == 2
    assert group.tokens == {0: 3, 1: 3}
    assert engine.generated == pytest.approx(6.0)


def test_engines_are_slower_while_the_learner_trains_and_only_then() -> None:
    turns = [simulate(setup(0, max_staleness=0), costs(beside=each), steps=20, warm_up=5) for each in (0.0, 0.5)]
    assert turns[0].step_s == pytest.approx(turns[1].step_s), "they never work at once"
    slow = Decode(((1, 0.05),))
    alone, beside = (simulate(setup(3), costs(decode=slow, beside=each), steps=60, warm_up=20) for each in (0.0, 0.5))
    assert alone.learner_idle > 0.1, "the engines decide how long a step takes"
    # In the 0.5 s that the learner trains they do what takes 0.5 / 1.5 s alone: 0.17 s more, but groups end together.
    assert 0.1 < beside.step_s - alone.step_s < 0.2


def test_a_learner_with_groups_in_store_never_waits_and_they_age_by_the_depth() -> None:
    found = simulate(setup(3), costs(step_s=10.0), steps=40, warm_up=10)
    assert found.step_s == pytest.approx(10.0)
    assert found.learner_idle == 0
    # A slot is free when a step is trained: what fills it is trained when the 3 steps before it are.
    assert found.staleness_mean == pytest.approx(3.0)


def test_engines_that_are_slower_than_the_learner_set_the_pace() -> None:
    """8 sequences at once at 0.01 s a step: 800 tokens/s, and 800 tokens are a step."""
    found = simulate(setup(2, max_sequences=8), costs(step_s=0.1), steps=60, warm_up=20)
    assert found.step_s == pytest.approx(1.0, rel=0.02)
    assert found.learner_idle == pytest.approx(0.9, abs=0.02)
    assert found.rollout_idle == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize(
    ("workers", "depth", "in_flight", "slower", "measured"), [(2, 4, 8, 3.0, 0.05), (3, 6, 24, 2.0, 0.29)]
)
def test_orders_go_to_whose_request_waits_for_as_many_places_as_were_free_when_it_asked(
    workers: int, depth: int, in_flight: int, slower: float, measured: float
) -> None:
    """Where the learner is slower, who of the workers gets its few orders is what their idle time depends on:
    `measured` is that of real workers and a real server (benchmarks.plan). Of requests that wait for ever and grow with
    the places that get free, 0.12 and 0.18 would come out."""
    made = setup(depth, engines=workers, max_sequences=32, max_in_flight=in_flight, group_size=4)
    made = replace(made, slots=in_flight // workers)
    told = costs(
        decode=Decode(((1, 0.0105), (32, 0.026))),
        lengths=LogNormal(60, 0.6, 400, of_prompt=0.0),
        step_s=0.1 * slower,
        token_s=0.0003 * slower,
        sync_s=0.08,
        stall_s=0.02,
    )
    found = [simulate(made, told, steps=60, warm_up=6, seed=seed).rollout_idle for seed in range(4)]
    assert sum(found) / len(found) == pytest.approx(measured, abs=0.05)


def test_the_learner_waits_for_the_publication_before() -> None:
    found = simulate(setup(4), costs(step_s=0.1, sync_s=2.0, decode=Decode(((1, 0.0001),))), steps=40, warm_up=10)
    assert found.step_s == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_ends_sequences_when_a_simulation_in_small_steps_does(seed: int) -> None:
    random = np.random.default_rng(seed)
    pace = [1.0, 1.0, 1.3, 1.9, 2.0]
    lengths = random.integers(1, 9, 12).tolist()
    engine = SimulatedEngine("w", 8, pace, 0)
    for length in lengths:
        engine.add(Member(Making(None, 1), [length]), 0.0)
    ended = []
    while (at := engine.next_end()) is not None:
        ended += [at] * len(engine.ended(at))

    running, waiting, now, slow = lengths[:4], lengths[4:], 0.0, []
    while running:
        now += pace[len(running)]
        running = [left - 1 for left in running]
        slow += [now] * running.count(0)
        running = [left for left in running if left]
        while waiting and len(running) < 4:
            running.append(waiting.pop(0))
    assert ended == pytest.approx(slow)
    assert engine.generated == sum(lengths)


@pytest.mark.parametrize("late", [3e5, 1e9, 1e12])
def test_a_sequence_ends_however_late_in_the_run_it_is(late: float) -> None:
    for length in range(1, 200):
        engine = SimulatedEngine("w", 8, [0.02, 0.0171], 0)
        engine.add(Member(Making(None, 1), [length]), late)
        ends = (engine.ended(engine.next_end() or 0.0) for _ in range(3))  # rounding may ask for one look more
        assert any(ends), length


def test_tokens_are_of_the_version_that_was_loaded_when_they_were_sampled() -> None:
    engine = SimulatedEngine("w", 8, [1.0] * 5, 0)
    group = Making(None, 1)
    engine.add(Member(group, [10]), 0.0)
    engine.load(1, 3.0, stall_s=5.0)
    engine.load(2, 8.0, stall_s=0.0)
    engine.load(3, 12.0, stall_s=0.0)
    end = engine.next_end()
    assert end is not None
    assert end == pytest.approx(15.0)
    engine.ended(end)
    assert group.tokens == {0: 3, 2: 4, 3: 3}


def test_the_same_seed_is_the_same_run_and_another_one_is_not() -> None:
    told = costs(lengths=LogNormal(100, 0.8, 1000), step_sigma=0.2, environment_s=0.5, environment_sigma=0.5, turns=3)
    runs = [simulate(setup(1), told, steps=15, warm_up=3, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_run_goes_on_where_it_ended() -> None:
    told, halves = costs(lengths=LogNormal(100, 0.8, 1000)), []
    for stops in ((20,), (7, 20)):
        simulation = Simulation(setup(1, engines=3), told)
        for stop in stops:
            simulation.run(stop)
        halves.append(simulation.steps)
    assert halves[0] == halves[1]


def test_no_token_is_older_than_the_bound_and_what_is_lost_for_it_counts() -> None:
    told = costs(lengths=LogNormal(300, 1.5, 20_000), step_s=0.5)
    found = simulate(setup(2, max_staleness=2), told, steps=60, warm_up=10)
    assert found.staleness_max == 2
    assert 0.1 < found.goodput < 0.99


def test_lengths_have_the_mean_that_was_asked_for() -> None:
    random = np.random.default_rng(0)
    for lengths, mean in ((LogNormal(500, 0.7, 1 << 20), 500), (Histogram((1, 11, 101), (3, 1)), (3 * 5.5 + 55.5) / 4)):
        drawn = lengths.draw(random, 4000, 8)
        assert drawn.shape == (4000, 8)
        assert drawn.min() >= 1
        assert drawn.mean() == pytest.approx(mean, rel=0.03)
        assert lengths.mean == pytest.approx(mean, rel=0.001)


def test_siblings_are_long_together_as_far_as_it_is_the_prompts() -> None:
    for share in (0.0, 0.5, 1.0):
        logs = np.log(LogNormal(10_000, 0.5, 1 << 30, share).draw(np.random.default_rng(0), 4000, 2))
        assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(share, abs=0.06)


def test_the_speed_of_an_engine_is_linear_between_what_was_measured() -> None:
    decode = Decode.of_rates([(2, 100.0), (10, 250.0)])
    assert [decode.step_s(batch) for batch in (1, 2, 6, 10, 14)] == pytest.approx([0.02, 0.02, 0.03, 0.04, 0.05])
    for wrong in ([], [(4, 1.0), (2, 1.0)], [(0, 1.0)], [(1, 0.0)]):
        with pytest.raises(ConfigError):
            Decode.of_rates(wrong)


def test_turns_share_the_tokens() -> None:
    assert in_turns(7, 3) == [3, 2, 2]
    assert in_turns(2, 5) == [1, 1]
