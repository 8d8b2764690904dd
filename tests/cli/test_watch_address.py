"""`asyncrl watch ADDRESS`: its output for given answers of a server; see tests/replay/server/test_viewing.py."""

from __future__ import annotations

import io
import logging
from dataclasses import replace

import pytest

from asyncrl.cli.main import main
from asyncrl.cli.watch_address import OVER_S, AddressView, numbers, problems, who
from asyncrl.replay.net.keyring import make_keys
from asyncrl.replay.protocol import PeerSeen, View
from asyncrl.telemetry.live.console import PlainConsole
from asyncrl.types import NO_VERSION
from tests.addresses import free_address
from tests.replay.helpers import Clock


def peer(name: str, role: str = "worker", **changes: float) -> PeerSeen:
    known = PeerSeen(role=role, name=name, silent_s=0.5, served=3, held=2, tokens_per_s=100.0, still_s=1.0)
    return replace(known, **changes)


def view(step: int = 4, **changes: object) -> View:
    now = {"replay/in_flight": 8.0, "replay/inserted": 3.0, "replay/inserted_age_1": 3.0, "replay/dropped_stale": 2.0}
    last = {"staleness/mean": 1.25, "goodput/trained_tokens": 1000.0 * step, "goodput/share": 0.875}
    there = (peer("w0"), peer("w1"), peer("rank 0", "learner", served=NO_VERSION))
    known = View(
        run="mine", clock=10.0 * step, trained_steps=step, committed_steps=2, policy_version=4, finished=False,
        waits="", paused="", now=now, last=last, peers=there, more_peers=0,
    )  # fmt: skip
    return replace(known, **changes)


def shown(clock: Clock, *, terminal: bool = False) -> tuple[AddressView, io.StringIO]:
    into = io.StringIO()
    console = PlainConsole(file=into, force_terminal=terminal, width=150 if terminal else 40, highlight=False)
    return AddressView("tcp://there:1", console, now=clock), into


def test_piped_it_prints_a_line_for_each_step_with_its_pace() -> None:
    told, into = shown(Clock())
    with told:
        assert all(told.take(each) for each in (view(4), view(4), None, view(6), view(8)))
    *lines, last = into.getvalue().splitlines()
    assert last == lines[-1]  # once more at the end
    assert lines == [
        "step 4 | version 4 | saved 2 | staleness 1.25 | generated 300",
        "step 6 | version 4 | saved 2 | staleness 1.25 | generated 300",
        "step 8 | version 4 | saved 2 | 10.0 s per step | staleness 1.25 | tokens/s trained 100 | generated 300",
    ]


def test_what_is_logged_while_it_is_drawn_stands_above_it(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("asyncrl.replay.client")
    told, into = shown(Clock(), terminal=True)
    with told:
        told.take(view())
        log.warning("no word from the [red]replay\x1b[2J server")
        told.take(view())
    assert "committed" not in into.getvalue(), "the server tells of steps that are saved, not of groups"
    assert "no word from the [red]replay\\x1b[2J server\n" in into.getvalue()
    assert capsys.readouterr().err == "" and not logging.getLogger("asyncrl").handlers


def test_the_pace_of_steps_that_take_minutes_is_theirs() -> None:
    """Of the views of a minute, in which one step ended, it said 60 s; and three times the tokens."""
    told, into = shown(Clock())
    for second in range(1000):
        told.take(view(second // 200, clock=float(second)))
    assert [line.split(" | ")[3:4] for line in into.getvalue().splitlines()[2:]] == 3 * [["200.0 s per step"]]
    assert "tokens/s trained 5 " in into.getvalue()


def test_a_server_that_goes_on_where_the_clock_is_another_begins_a_new_pace() -> None:
    told, _ = shown(Clock())
    for step in range(1, 9):
        told.take(view(step, clock=1e6 + step if step < 5 else 10.0 * step))
    assert "10.0 s per step" in told.line(view(8))


def test_a_server_that_was_killed_and_counts_tokens_anew_makes_the_pace_no_slower() -> None:
    """It said 1 token/s where there were a thousand, and for a minute too few."""
    told, _ = shown(Clock())
    for step in range(1, 9):
        counted = {"goodput/trained_tokens": 1000.0 * (step if step < 5 else step - 4)}
        told.take(view(step, last=counted))
    assert "10.0 s per step | staleness 1.25 | tokens/s trained 100 " in told.line(view(8))
    told.take(view(8, last={}))
    assert "per step" not in told.line(view(8))


def test_who_comes_goes_and_falls_silent_is_said_once() -> None:
    told, into = shown(Clock())
    silent = (peer("w1", silent_s=7.0), peer("rank 0", "learner"))
    for each in (
        view(),
        view(peers=silent),
        view(peers=silent),
        view(peers=(*silent, peer("\x1b[2Jw2")), paused="full"),
    ):
        told.take(each)
    said = into.getvalue()
    assert said.count("worker w0 has disconnected") == 1 and "\x1b" not in said and said.count("has connected") == 1
    assert said.count("worker w1 has been silent for 0:07: stopped, stuck or cut off; after") == 1
    assert said.count("nothing new is admitted: full") == 1


def test_alarms_that_the_server_s_numbers_show_are_said_once_and_their_end_too() -> None:
    clock = Clock()
    told, into = shown(clock)
    for step in range(1, 40):
        clock.now = 10.0 * step
        other_code = {"replay/workers_other_code": 2.0 if 5 <= step < 8 else 0.0, "replay/workers": 2.0}
        told.take(view(step, now=other_code, last={"machine/memory_free": 0.01 if step > 30 else 0.5}))
    clock.now += 130.0
    told.take(view(39))
    told.take(view(39))
    clock.now += 10.0
    told.take(view(40, clock=clock.now))
    said = [line for line in into.getvalue().splitlines() if line.startswith("alarm ")]
    wanted = (
        "alarm other_code at step 5: 2 rollout worker(s) run another version of your code",
        "alarm other_code at step 18: over after 3 steps",
        "alarm memory at step 31: a machine of the run has only 1.0% of memory free",
        "alarm stall at step 39: no step has ended for 130 s; one usually takes 10.0 s",
        "alarm stall at step 40: over after 140 s",
    )
    assert [line[: len(start)] for line, start in zip(said, wanted, strict=True)] == list(wanted)


def test_a_finished_run_does_not_stall() -> None:
    clock = Clock()
    told, into = shown(clock)
    for step in (1, 2, 3):
        clock.now = 10.0 * step
        told.take(view(step, finished=step == 3))
    clock.now = 1000.0
    told.take(view(3, finished=True))
    assert "alarm" not in into.getvalue()


def test_a_server_that_went_back_to_a_checkpoint_has_no_pace_below_zero() -> None:
    told, into = shown(Clock())
    for each in (view(4), view(6), view(5, clock=70.0)):
        told.take(each)
    assert "step 5 | version 4 | saved 2 | staleness" in into.getvalue()


def test_it_ends_when_the_server_of_a_finished_run_is_silent_and_not_before() -> None:
    clock = Clock()
    told, into = shown(clock)
    assert told.take(view())
    clock.now = 100 * OVER_S
    assert told.take(None)
    assert told.take(view(finished=True)) and told.take(None)
    clock.now += OVER_S + 1
    assert not told.take(None) and "the run is over" in into.getvalue()


def test_a_server_that_was_lost_between_two_views_may_have_ended() -> None:
    told, _ = shown(Clock())
    assert told.last_seen() == ""
    told.take(view(7))
    assert "at step 7 when it last answered. It ends when its run ends" in told.last_seen()


def test_on_a_terminal_it_draws_problems_first_then_numbers_and_who_is_there() -> None:
    clock = Clock()
    told, into = shown(clock, terminal=True)
    with told:
        told.take(view(waits="step 4 needs 2 groups", peers=(peer("w0", silent_s=9.0),), more_peers=3))
        clock.now = 8.0
        told.take(None)
    drawn = into.getvalue()
    wanted = (
        "the replay server at tcp://there:1 has been silent for 0:08", "the learner waits: step 4 needs 2 groups",
        "8 groups in flight, 3 wait, 0 planned", "1: 3", "stale 2", "87.5%", "3 (1 behind)", "3 others",
    )  # fmt: skip
    assert [text for text in wanted if text not in drawn] == []
    assert list(problems(view())) == list(problems(view(peers=(), more_peers=3))) == []
    assert list(problems(view(peers=(), finished=True))) == []
    assert [each.partition(":")[0] for each in problems(view(peers=(peer("w0"),)))] == ["no learner is connected"]
    assert numbers(view()).row_count == 6 - 1 and who(view()).row_count == 3


def test_without_its_keys_it_says_which_and_a_server_that_is_not_there_is_named(
    tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["watch", "tcp://127.0.0.1:9"]) == 2
    assert "--keys DIR" in capsys.readouterr().err
    monkeypatch.setattr("asyncrl.cli.watch_address.PATIENCE_S", 1.0)
    make_keys(tmp_path / "keys")
    for wrong in ("http://there", "tcp://there", "tcp://*:5577", "tcp://there:99999", "ipc://", "inproc://x"):
        assert main(["watch", wrong, "--keys", str(tmp_path / "keys")]) == 2
        assert "takes a run folder, tcp://HOST:PORT or ipc://PATH" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--keys", str(tmp_path / "keys")]) == 2
    assert "--keys is for the address of a run" in capsys.readouterr().err
    address = free_address()
    assert main(["watch", address, "--keys", str(tmp_path / "keys")]) != 0
    assert f"{address} did not answer" in capsys.readouterr().err
