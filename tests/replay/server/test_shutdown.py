"""When the server of a finished run goes."""

from __future__ import annotations

from asyncrl.replay.journal.durable import RESUME_S
from asyncrl.replay.server.shutdown import GRACE_S, Shutdown


def test_a_server_stays_while_its_run_goes_on_or_a_member_is_there() -> None:
    ending = Shutdown(finished=False)
    for now in (1.0, 1e6):
        assert not ending.look(False, False, now) and not ending.look(True, True, now)


def test_after_the_last_goodbye_it_stays_for_the_grace_and_any_member_starts_that_anew() -> None:
    ending = Shutdown(finished=False)
    assert not ending.look(True, False, 1.0)
    assert not ending.look(True, True, 1.0 + GRACE_S)
    assert not ending.look(True, False, 10.0)
    assert not ending.look(True, False, 10.0 + GRACE_S)
    assert ending.look(True, False, 10.1 + GRACE_S)


def test_a_run_that_was_over_before_this_start_is_kept_for_its_resume_until_a_member_came() -> None:
    ending = Shutdown(finished=True)
    assert not ending.look(True, False, 1.0)
    assert not ending.look(True, False, RESUME_S)
    assert not ending.look(True, True, RESUME_S)
    ending.look(True, False, RESUME_S)
    assert ending.look(True, False, RESUME_S + 1.1 * GRACE_S)
