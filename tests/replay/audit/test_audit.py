"""`asyncrl audit`: whole histories balance, and each planted violation is found and named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

import pytest

from asyncrl.replay.audit.report import Audit, audit, table
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.types import NO_VERSION, DropReason, GroupHeader, TrajectoryHeader
from tests.replay.liveness import run_schedule

SETTINGS = {"max_staleness": 1, "groups_per_step": 2, "group_size": 2}


def begun(**changes) -> ev.Snapshotted:
    """The first record of a new journal."""
    run = {"run_id": "r", "settings": SETTINGS | changes}
    return ev.Snapshotted(run, -1, ReplayState().image(), ())


def issued(group: int, attempt: int = 0, served: int = 0) -> ev.Issued:
    values = {"group_id": group, "prompt_index": 10 + group, "attempt": attempt, "worker": "w", "incarnation": "i"}
    rest = {"policy_version": served, "served_version": served}
    return ev.Issued(**values, **rest)


def inserted(group: int, *runs: tuple[int, int], attempt: int = 0, size: int = 2) -> ev.Inserted:
    length = 2 + sum(count for _, count in runs)
    trajectory = TrajectoryHeader(length=length, prompt_length=2, reward=1.0, version_tokens=runs)
    header = GroupHeader(
        group_id=group, prompt_index=10 + group, attempt=attempt, worker="w", trajectories=(trajectory,) * size
    )
    return ev.Inserted(header, None)


def restored(step: int, version: int) -> ev.Restored:
    return ev.Restored(step, version)


def whole_run() -> list[ev.Event]:
    """Two steps of two groups; group 2 is made at the second attempt, group 4 dropped as stale, one rollback."""
    return [
        begun(),
        restored(-1, NO_VERSION),
        ev.Published(0, NO_VERSION),
        *(issued(group) for group in range(5)),
        inserted(0, (0, 3)),
        inserted(1, (0, 3)),
        ev.Sealed(0, 0, 0, (0, 1), 1),
        ev.Returned(2, counted=True),
        ev.Trained(0, 1),
        ev.Committed(0),
        issued(2, attempt=1, served=1),
        inserted(2, (1, 3), attempt=1),
        inserted(3, (0, 1), (1, 2)),
        inserted(4, (0, 3)),
        ev.Sealed(1, 1, 0, (2, 3), 1),
        ev.Trained(1, 2),
        restored(0, 1),
        ev.Published(3, 1),
        ev.Sealed(1, 3, 0, (2, 3), 1),
        ev.Trained(1, 4),
        ev.Dropped(4, DropReason.STALE),
        ev.Committed(1),
        ev.Finished(),
    ]


def checked(events: Iterable[ev.Event]) -> Audit:
    return audit(enumerate(events))


def planted(place: int, *instead: ev.Event) -> list[ev.Event]:
    """The whole run with the event at `place` replaced."""
    events = whole_run()
    return [*events[:place], *instead, *events[place + 1 :]]


def test_a_whole_run_balances_and_its_numbers_are_those_of_the_surviving_history() -> None:
    found = checked(whole_run())
    assert found.balances, found.violations
    assert (found.admitted, found.trained, found.dropped) == (5, 4, {"stale": 1})
    assert (found.trained_steps, found.committed_steps, found.rollbacks, found.finished) == (2, 2, 1, True)
    assert (found.versions, found.lineages, found.lost_attempts) == (5, 2, 1)
    assert found.staleness == {0: 6 + 6 + 6 + 4, 1: 2}
    assert found.wasted_tokens == {"dropped_stale": 6, "rolled_back": 12}
    assert "balances" in table(found)


def test_over_age_tokens_are_wasted_and_in_no_histogram() -> None:
    found = checked([replace(begun(), run={"settings": SETTINGS | {"max_staleness": 0}}), *whole_run()[1:]])
    assert found.staleness == {0: 22}
    assert found.wasted_tokens["over_age"] == 2


WHOLE = whole_run()
SEALED_1 = next(i for i, e in enumerate(WHOLE) if isinstance(e, ev.Sealed) and e.step == 1)
GONE_BACK = max(i for i, e in enumerate(WHOLE) if isinstance(e, ev.Restored))
LAST_TRAINED = max(i for i, e in enumerate(WHOLE) if isinstance(e, ev.Trained))
FIRST_TRAINED = min(i for i, e in enumerate(WHOLE) if isinstance(e, ev.Trained))
DROPPED = next(i for i, e in enumerate(WHOLE) if isinstance(e, ev.Dropped))
REISSUED = next(i for i, e in enumerate(WHOLE) if isinstance(e, ev.Issued) and e.attempt)
INSERTED_2 = next(i for i, e in enumerate(WHOLE) if isinstance(e, ev.Inserted) and e.header.group_id == 2)
REPUBLISHED = max(i for i, e in enumerate(WHOLE) if isinstance(e, ev.Published))
ISSUED_3 = next(i for i, e in enumerate(WHOLE) if isinstance(e, ev.Issued) and e.group_id == 3)
COMMITTED_1 = max(i for i, e in enumerate(WHOLE) if isinstance(e, ev.Committed))


@pytest.mark.parametrize(
    ("place", "instead", "said"),
    [
        pytest.param(SEALED_1, [ev.Sealed(1, 1, 0, (1, 3), 1)], "but it is trained", id="trained twice"),
        pytest.param(SEALED_1, [ev.Sealed(1, 1, 0, (2, 2), 1)], "a group twice", id="twice in a step"),
        pytest.param(SEALED_1, [ev.Sealed(1, 1, 0, (2,), 1)], "has 1 groups", id="short batch"),
        pytest.param(SEALED_1, [ev.Sealed(1, 1, 0, (2, 3), 4)], "a staleness bound of 4, not 1", id="other bound"),
        pytest.param(GONE_BACK, [ev.Restored(0, 1, again=True)], "its plan is fixed", id="other batch after a restart"),
        pytest.param(DROPPED, [], "are still open", id="lost group"),
        pytest.param(DROPPED, [ev.Dropped(2, DropReason.STALE)], "dropped, but it is trained", id="trained, dropped"),
        pytest.param(DROPPED, [ev.Dropped(4, DropReason.STALE)] * 2, "is not open", id="dropped twice"),
        pytest.param(ISSUED_3, [], "is not open", id="inserted without admission"),
        pytest.param(ISSUED_3, [issued(3), issued(3, attempt=1)], "held by a worker", id="two holders"),
        pytest.param(REISSUED, [], "no worker held it", id="fenced attempt accepted"),
        pytest.param(REISSUED, [issued(2, attempt=0, served=1)], "as attempt 0 a second time", id="attempt reused"),
        pytest.param(INSERTED_2, [inserted(2, (1, 3))], "(prompt, attempt)", id="old attempt"),
        pytest.param(INSERTED_2, [inserted(2, (1, 3), attempt=1)] * 2, "but it is inserted", id="no dedup"),
        pytest.param(INSERTED_2, [inserted(2, (1, 3), attempt=1, size=1)], "is split", id="group split"),
        pytest.param(INSERTED_2, [inserted(2, (9, 3), attempt=1)], "never published", id="unknown version"),
        pytest.param(LAST_TRAINED, [ev.Trained(1, 2)], "published twice", id="version reused"),
        pytest.param(LAST_TRAINED, [ev.Trained(2, 4)], "but 1 is next", id="step skipped"),
        pytest.param(REPUBLISHED, [ev.Published(3, 7)], "never published", id="unknown parent"),
        pytest.param(FIRST_TRAINED, [], "sealed", id="training not recorded"),
        pytest.param(COMMITTED_1, [ev.Committed(2)], "was not trained", id="committed, not trained"),
        pytest.param(COMMITTED_1, [ev.Committed(1), restored(0, 1)], "1 is committed", id="back before the commit"),
    ],
)
def test_a_planted_violation_is_found(place: int, instead: list[ev.Event], said: str) -> None:
    found = checked(planted(place, *instead))
    assert not found.balances
    assert any(said in text for text in found.violations), found.violations
    assert "DOES NOT BALANCE" in table(found)


def test_a_batch_trained_later_than_it_was_sealed_for_shows_tokens_over_the_bound() -> None:
    events = [
        begun(max_staleness=0, groups_per_step=1),
        restored(-1, NO_VERSION),
        ev.Published(0, NO_VERSION),
        issued(0),
        inserted(0, (0, 3)),
        ev.Sealed(0, 0, 0, (0,)),
        ev.Published(1, 0),
    ]
    assert checked([*events, ev.Trained(0, 2)]).balances  # the same weights under a new number
    back = ev.Restored(-1, 0, again=True)
    rolled = [*events, ev.Trained(0, 2), back, replace(events[-1], policy_version=3, parent=2)]
    found = checked([*rolled, ev.Trained(0, 4)])
    assert any("over the bound 0" in text for text in found.violations), found.violations


@pytest.mark.parametrize(
    ("policy", "runs", "passes"),
    [
        ("mask", ((0, 1), (1, 2)), True),
        ("drop", ((0, 1), (1, 2)), False),
        ("drop", ((1, 3),), True),
        ("mask", ((0, 3),), False),
        ("wait", ((0, 3),), False),
    ],
)
def test_a_group_that_the_consumption_gate_had_to_hold_back_is_found(policy: str, runs: tuple, passes: bool) -> None:
    events = [
        begun(max_staleness=0, groups_per_step=1, stale_policy=policy),
        restored(-1, NO_VERSION),
        ev.Published(0, NO_VERSION),
        *(issued(0), issued(1), inserted(0, (0, 3)), ev.Sealed(0, 0, 0, (0,)), ev.Trained(0, 1)),
        *(inserted(1, *runs), ev.Sealed(1, 1, 0, (1,)), ev.Trained(1, 2)),
    ]
    found = checked(events)
    assert found.balances is passes
    assert passes or "group 1 is in step 1 with tokens of staleness 1 over the bound" in found.violations[0]


def test_a_group_from_beyond_the_window_is_found() -> None:
    def history(window: int) -> list[ev.Event]:
        events = [begun(groups_per_step=1, window=window), restored(-1, NO_VERSION), ev.Published(0, NO_VERSION)]
        events += [issued(group) for group in range(4)]
        events += [inserted(0, (0, 3)), ev.Sealed(0, 0, 0, (0,), 1), ev.Trained(0, 1)]
        return [*events, inserted(3, (0, 3)), ev.Sealed(1, 1, 0, (3,), 1), ev.Trained(1, 2)]

    assert checked(history(0)).balances and checked(history(3)).balances
    (found,) = checked(history(2)).violations
    assert "step 1 has groups [3], which are beyond the window of 2 groups from group 1 on" in found


def test_a_group_that_is_used_too_often_is_found() -> None:
    def history(uses: int) -> list[ev.Event]:
        events = [
            begun(groups_per_step=1, max_times_sampled=uses),
            restored(-1, NO_VERSION),
            ev.Published(0, NO_VERSION),
        ]
        events += [issued(0), inserted(0, (0, 3)), ev.Sealed(0, 0, 0, (0,), 1), ev.Trained(0, 1)]
        return [*events, ev.Reused((0,)), ev.Sealed(1, 1, 0, (0,), 1), ev.Trained(1, 2)]

    found = checked(history(2))
    assert found.balances and "trained, each in at most 2 steps: 1 in 2" in table(found)
    assert any("used again" in text for text in checked(history(1)).violations)
    retired = [*history(3), ev.Reused((0,)), ev.Retired(0), ev.Dropped(0, DropReason.STALE)]
    cut_short = checked(retired[:-1])
    assert cut_short.balances and (cut_short.trained_in, cut_short.retired) == ({2: 1}, 1)
    assert "at most 3 steps: 1 in 2 (1 became too old for a further step, or the run ended)" in table(cut_short)
    assert not checked(retired).balances


def test_a_group_admitted_by_sample_is_sealed_whole_and_large_enough() -> None:
    def history(sealed: tuple[int, ...], lost: int, fewest: int) -> list[ev.Event]:
        events = [begun(groups_per_step=1, group_size=3, min_group_size=fewest), restored(-1, NO_VERSION)]
        events += [ev.Published(0, NO_VERSION), ev.Begun(0, 3, 10)]
        for member in range(3):
            events.append(replace(issued(member), prompt_index=10))
            made = inserted(member, (0, 3), size=1)
            events.append(replace(made, header=replace(made.header, prompt_index=10)))
        events += [ev.Dropped(member, DropReason.FAILED_REWARD) for member in range(3 - lost, 3)]
        return [*events, ev.Sealed(0, 0, 0, sealed, 1), ev.Trained(0, 1)]

    found = checked(history((0, 1, 2), 0, 0))
    assert found.balances and (found.admitted, found.trained) == (3, 3), found.violations
    assert "members of groups" in table(checked([replace(begun(), run={"settings": SETTINGS | {"by_sample": True}})]))
    assert checked(history((0, 1), 1, 2)).balances
    assert "without its members [1]" in checked(history((0, 2), 0, 0)).violations[0]
    assert "lacks 1 of 3 members" in checked(history((0, 1), 1, 0)).violations[0]


def test_histories_of_random_schedules_balance() -> None:
    for seed in range(400):
        simulation = run_schedule(seed)
        state = simulation.core.state
        found = checked([begun(**asdict(simulation.began)), *simulation.events])
        assert found.balances, (seed, found.violations)
        counts = {key.value: count for key, count in state.ledger.counts.items()}
        assert counts == {name: getattr(found, name) for name in counts}
        assert (found.admitted, found.dropped) == (state.ledger.admitted, state.ledger.dropped_by_name())
        assert (found.trained_steps, found.committed_steps) == (state.trained_steps, state.committed_step + 1)
