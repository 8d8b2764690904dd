"""The payloads of a real run are in two shards, which are killed during the run."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.config import JOURNAL_DIR
from asyncrl.replay.audit.report import audit
from asyncrl.replay.audit.rerun import RetainedReplay, read_surviving
from asyncrl.replay.journal.recovery import read_journal
from tests.integration.conftest import StartLocal
from tests.integration.test_loop import assert_conserved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 24
"""More than are trained until the last is killed."""


def test_shards_killed_in_the_middle_of_a_run_lose_no_group(start_local: StartLocal) -> None:
    run = start_local(
        {
            "learner.steps": STEPS,
            "learner.save_every": 5,
            "rollout.host": "process",
            "rollout.workers": 2,
            "replay.shards": 2,
            "replay.journal.retain": "all",
            "replay.journal.segment_mb": 4,
        }
    )
    run.wait_for_step(3, 300)
    killed = {run.kill("asyncrl.replay.shards 0 ", set())}
    run.wait_for_step(run.rows()[-1]["step"] + 3, 300)
    killed |= {run.kill("asyncrl.replay.shards 0 ", killed), run.kill("asyncrl.replay.shards 1 ", set())}
    assert run.finish(400) == 0, run.tail()
    assert run.output.read_text().count("restarted with its journal") == 3
    rows = run.rows()
    assert [row["policy_version"] for row in rows] == list(range(1, STEPS + 1)), "the learner was restarted"
    for row in rows:
        assert_conserved(row)
    journal = run.directory / JOURNAL_DIR
    books = audit(read_journal(journal))
    assert books.balances and books.trained == STEPS * 8 and books.finished, books

    history = read_surviving(journal)
    replay = RetainedReplay(journal, history, max_staleness=4, samples=4)
    for step in range(STEPS):
        lease = replay.lease(step=step, rank=0, world=1, wait_s=0)
        tokens = sum(np.count_nonzero(one.loss_mask) for one in lease.trajectories.values())
        wanted = [lease.plan.groups[group].trajectories[member].loss_tokens for group, member in lease.plan.shards[0]]
        assert tokens == sum(wanted) > 0
    replay.close()
