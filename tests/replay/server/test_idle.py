"""The share of its time in which the server waits."""

from __future__ import annotations

from asyncrl.replay.server.idle import Idle


def test_waits_count_once_and_the_share_begins_anew_when_it_is_asked() -> None:
    now = [0]
    idle = Idle(lambda: now[0])
    assert idle.share() == 0.0, "no time has gone by"
    for wait, work in ((30, 10), (40, 20)):
        with idle:
            now[0] += wait
        now[0] += work
    assert idle.share() == 0.7
    now[0] += 10
    assert idle.share() == 0.0
    with idle:
        now[0] += 10
    assert idle.share() == 1.0
