"""When the server of a finished run goes."""

from __future__ import annotations

from asyncrl.replay.journal.durable import RESUME_S
from asyncrl.replay.server.shutdown import GRACE_S, LEAVE_S, Shutdown


def test_a_server_stays_while_its_run_goes_on_or_a_member_is_there() -> None:
    ending = Shutdown(finished=False)
    for now in (1.0, 1e6):
        assert not ending.look(False, [], now) and not ending.look(True, ["worker", "shard"], now)
        assert not ending.over


def test_after_the_last_goodbye_it_stays_for_the_grace_and_any_member_starts_that_anew() -> None:
    ending = Shutdown(finished=False)
    assert not ending.look(True, [], 1.0)
    assert not ending.look(True, ["learner"], 1.0 + GRACE_S)
    assert not ending.look(True, [], 10.0)
    assert not ending.look(True, [], 10.0 + GRACE_S)
    assert ending.look(True, [], 10.1 + GRACE_S)


def test_shards_are_told_first_and_waited_for_only_so_long() -> None:
    ending = Shutdown(finished=False)
    ending.look(True, ["shard"], 1.0)
    assert not ending.look(True, ["shard"], 1.1 + GRACE_S) and ending.over
    assert ending.look(True, [], 1.2 + GRACE_S)
    assert ending.look(True, ["shard"], 1.1 + GRACE_S + LEAVE_S)


def test_a_run_that_was_over_before_this_start_is_kept_for_its_resume_until_a_member_came() -> None:
    ending = Shutdown(finished=True)
    assert not ending.look(True, [], 1.0)
    assert not ending.look(True, [], RESUME_S)
    assert not ending.look(True, ["learner"], RESUME_S)
    ending.look(True, [], RESUME_S)
    assert ending.look(True, [], RESUME_S + 1.1 * GRACE_S)
