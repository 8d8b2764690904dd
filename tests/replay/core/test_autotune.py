"""Moves reach admission, are journalled, and outlive the server."""

from __future__ import annotations

import logging

import pytest

from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.journal.durable import open_core, recover
from asyncrl.replay.journal.log import JournalSettings
from tests.replay.helpers import Clock, settings
from tests.replay.memory_disk import MemoryDisk
from tests.replay.play import Play

RUN = {"run_id": "r", "run_digest": "d", "boot": "b"}
TUNED = {"groups_per_step": 2, "max_staleness": 8, "pipeline_depth": 0, "max_in_flight": 16, "most_in_flight": 16}


def steps(play: Play, count: int, *, paused: str = "") -> dict[str, float]:
    """Groups take a second, a train step 0.2 s; metrics of the last. `paused`: why nothing is admitted meanwhile."""
    metrics: dict[str, float] = {}
    for _ in range(count):
        play.load()
        orders = play.acquire()
        play.core.lease(play.step)
        play.clock.now += 1.0
        for order in orders:
            play.insert(order)
        play.core.heartbeat("w", "a", {"generated_tokens": 8.0 * play.step})
        play.core.lease(play.step)
        play.clock.now += 0.2
        play.core.paused = paused
        metrics = play.train()[1].metrics
        play.core.paused = ""
    return metrics


def test_a_learner_that_waits_gets_a_depth_and_every_move_is_journalled_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[ev.Event] = []
    play = Play(**TUNED, journal=told.append)
    with caplog.at_level(logging.INFO):
        metrics = steps(play, 60)
    moves = [event for event in told if isinstance(event, ev.Configured)]
    now = play.core.run.settings
    assert moves and now.pipeline_depth > 0
    assert moves[-1].settings == now.plain()
    assert metrics["autotune/moves"] == len(moves)
    assert metrics["autotune/pipeline_depth"] == now.pipeline_depth
    assert metrics["autotune/max_in_flight"] == now.max_in_flight
    assert sum("autotune: pipeline_depth 0 -> " in record.message for record in caplog.records) == 1
    assert all("the learner waited" in record.message for record in caplog.records if "autotune" in record.message)


def test_without_it_nothing_moves_and_nothing_is_said_of_it() -> None:
    told: list[ev.Event] = []
    metrics = steps(Play(**TUNED | {"most_in_flight": 0}, journal=told.append), 40)
    assert not [event for event in told if isinstance(event, ev.Configured)]
    assert not [name for name in metrics if name.startswith("autotune/")]


def test_other_engines_and_a_full_disk_are_no_measurement() -> None:
    play = Play(**TUNED)
    for count in range(30):
        play.core.hello("other", f"b{count}", -1)
        steps(play, 2)
        play.core.goodbye("other", f"b{count}")
    assert play.core.run.settings.pipeline_depth == 0
    play = Play(**TUNED)
    steps(play, 60, paused="the disk is full")
    assert play.core.run.settings.pipeline_depth == 0


def opened(disk: MemoryDisk, **changed: int):
    journal = JournalSettings(segment_bytes=2048)
    return open_core(disk, settings(**TUNED | changed), Clock(), journal=journal, run=RUN)


def test_a_server_that_is_started_again_goes_on_with_what_was_found() -> None:
    disk = MemoryDisk()
    core, writer = opened(disk)
    core.restore(step=None, policy_version=-1, snapshot=None, incarnation="l")
    core.run.allow(pipeline_depth=5, max_in_flight=11)
    writer.write_batch()
    for _ in range(3):  # of the next, and of the segments that they begin
        core, writer = opened(disk)
        assert (core.run.settings.pipeline_depth, core.run.settings.max_in_flight) == (5, 11)
        writer.write_batch()
    for version in range(60):  # segments are full, and begun
        core.publish(policy_version=version, parent=version - 1)
        writer.write_batch()
    core.run.allow(pipeline_depth=4, max_in_flight=9)
    writer.write_batch()
    found = recover(disk)
    assert found is not None and found.run["settings"] == core.run.settings.plain()
    core, _ = opened(disk, max_staleness=3, most_in_flight=7, max_in_flight=7)
    assert (core.run.settings.pipeline_depth, core.run.settings.max_in_flight) == (3, 7), "as far as it is allowed now"


def test_what_was_found_is_forgotten_where_nothing_is_to_be_moved() -> None:
    disk = MemoryDisk()
    core, writer = opened(disk)
    core.restore(step=None, policy_version=-1, snapshot=None, incarnation="l")
    core.run.allow(pipeline_depth=5, max_in_flight=11)
    writer.write_batch()
    core, writer = opened(disk, most_in_flight=0, pipeline_depth=1)
    assert (core.run.settings.pipeline_depth, core.run.settings.max_in_flight) == (1, 16)
    writer.write_batch()
    core, _ = opened(disk)
    assert core.run.settings.pipeline_depth == 0, "nor what was chosen by hand"
    older = {name: value for name, value in core.run.settings.plain().items() if name != "most_in_flight"}
    assert core.run.settings.as_tuned(older) == core.run.settings
