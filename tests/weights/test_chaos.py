from __future__ import annotations

import pytest

from tests.weights.chaos import INJECTIONS, SHORT, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_phase_has_an_injection_and_the_short_run_has_every_kind():
    assert len(INJECTIONS) == 42
    kinds = {(injection.action, injection.who) for injection in INJECTIONS}
    short = {(injection.action, injection.who) for injection in SHORT}
    assert short == kinds and len(SHORT) == 8


def test_workers_and_learner_killed_or_frozen_in_an_update_hang_nobody_and_mix_no_weights():
    rows = []
    run(SHORT, rows.append, limit_s=100.0)  # a machine that is busy with other tests makes no statement about seconds
    assert len([row for row in rows if "recovered_s" in row]) == len(SHORT)
