from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.replay.core.admission import (
    AdmissionSettings,
    judge,
    may_admit,
    may_train,
    over_committed,
    stale_by_quartile,
)
from asyncrl.schema import Config
from asyncrl.types import Assignment, StalePolicy, TrajectoryHeader
from tests.replay.helpers import header, settings

ORDER = Assignment(group_id=0, prompt_index=0, attempt=0, seed=0, policy_version=0)


def test_settings_come_from_the_run_configuration() -> None:
    config = Config()
    config.learner.groups_per_step, config.replay.stale_policy = 5, "wait"
    made = AdmissionSettings.from_config(config)
    assert (made.groups_per_step, made.stale_policy) == (5, StalePolicy.WAIT)


def test_admission_opens_one_step_and_the_depth_ahead_of_the_learner() -> None:
    gate = settings(groups_per_step=4, pipeline_depth=2, max_staleness=2, max_in_flight=100)
    assert may_admit(gate, untrained=11, in_flight=11)
    assert not may_admit(gate, untrained=12, in_flight=0)
    assert not may_admit(settings(max_in_flight=3), untrained=0, in_flight=3)


def test_tokens_are_judged_one_by_one() -> None:
    ages = {4: 3, 5: 2, 7: 0}
    verdict = judge(header(ORDER, (4, 10), (5, 5), (7, 1)), ages, 2)
    assert (verdict.fresh_tokens, verdict.stale_tokens, verdict.staleness) == (12, 20, 3)
    assert may_train(verdict, StalePolicy.MASK)
    assert not may_train(verdict, StalePolicy.DROP)
    assert not may_train(judge(header(ORDER, (4, 10)), ages, 2), StalePolicy.MASK)


def test_wasted_tokens_are_counted_where_they_stand() -> None:
    long = TrajectoryHeader(length=11, prompt_length=1, reward=0.0, version_tokens=((0, 3), (9, 7)))
    assert stale_by_quartile(long, {0: 5, 9: 0}, 1) == [2, 1, 0, 0]
    assert stale_by_quartile(long, {0: 5, 9: 5}, 1) == [2, 3, 2, 3]


@given(st.lists(st.integers(-2, 4), max_size=12), st.integers(1, 3))
def test_a_batch_is_over_committed_exactly_when_the_rest_cannot_be_trained_in_time(slacks, groups_per_step) -> None:
    """Earliest deadline first is optimal, so simulate it."""
    alive = sorted(slack for slack in slacks if slack >= 0)
    in_time = all(
        alive[place] >= 1 + place // groups_per_step for place in range(len(alive))
    )  # The first B are trained one step later, the next B two...
    assert (over_committed(slacks, groups_per_step) is None) == in_time
