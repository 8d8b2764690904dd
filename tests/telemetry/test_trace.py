"""The trace of a run: one clock, spans that nest, a file that Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path

import msgpack
import numpy as np
import pytest

from asyncrl.cli.main import main
from asyncrl.replay.client.clocks import Clocks
from asyncrl.replay.codec.reply import ServerTime
from asyncrl.spans import MAIN
from asyncrl.telemetry.trace import GROUP, Process, Span, align, life_of, offset_at, read_trace, tracks
from tests.telemetry.traced import assert_nests, parsed


def process(*found: Span, role: str = "worker", boot: str = "here") -> Process:
    return Process(role, 7, "host", boot, 0, list(found))


def test_spans_nest_whatever_lies_over_what_and_none_is_lost() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        begins = rng.integers(0, 50, 40)
        found = [
            Span("s", str(rng.choice(["groups", "main"])), int(begin), int(begin + rng.integers(0, 20)),
                 {"group": int(rng.integers(0, 5)), "attempt": 0})
            for begin in begins
        ]  # fmt: skip
        one = process(*found)
        names, slices = parsed([one])
        assert_nests(slices, names)
        assert sorted((s.begin, s.end) for s in slices) == sorted((s.begin, max(s.end, s.begin + 1)) for s in found)


def test_what_is_of_one_group_stays_on_one_track_and_tracks_are_used_again() -> None:
    def group(number: int, at: int) -> list[Span]:
        of = {"group": number, "attempt": 0}
        return [Span("group", "groups", at, at + 10, of), Span("generate", "groups", at + 1, at + 8, of)]

    found = tracks(process(*group(1, 0), *group(2, 5), *group(3, 10), Span("a", MAIN, 0, 20, {})))
    assert [name for name, _ in found] == [MAIN, "groups 1", "groups 2"]
    assert [[span.of["group"] for span in row] for _, row in found[1:]] == [[1, 1, 3, 3], [2, 2]]


def test_siblings_that_generate_side_by_side_get_tracks_of_their_own() -> None:
    of = {"group": 1, "attempt": 0}
    spans = [Span("group", "groups", 0, 20, of), Span("x", "groups", 1, 9, of), Span("x", "groups", 5, 15, of)]
    assert [len(row) for _, row in tracks(process(*spans))] == [2, 1]


def test_a_flow_links_what_is_of_one_group_and_names_and_notes_are_kept() -> None:
    one = process(
        Span("generate", "groups", 1, 2, {"group": 5, "attempt": 0}), Span("forward", MAIN, 3, 4, {"groups": [5, 6]})
    )
    names, slices = parsed([one, process(Span("insert", MAIN, 9, 9, {"groups": [6]}))])
    by_name = {each.name: each for each in slices}
    assert by_name["generate"].flows == (GROUP + 5,) and by_name["forward"].flows == (GROUP + 5, GROUP + 6)
    assert by_name["insert"].flows == (GROUP + 6,)
    assert by_name["generate"].args == {"group": 5, "attempt": 0}
    assert set(names.values()) == {"worker (pid 7)", "groups", MAIN}


def test_another_machine_is_brought_to_the_servers_clock_without_changing_an_order() -> None:
    clocks = [(100, 1000, 1), (200, 1100, 1), (300, 1050, 1)]
    assert [offset_at(clocks, at) for at in (0, 100, 150, 200, 250, 900)] == [1000, 1000, 1050, 1100, 1075, 1050]
    far = process(*(Span("s", MAIN, at, at + 1, {}) for at in range(0, 400)), boot="there")
    far.clocks = clocks
    align(far)
    begins = [span.begin for span in far.spans]
    assert begins == sorted(begins) and (begins[0], begins[150]) == (1000, 1200)


def test_a_resume_on_a_machine_that_was_booted_anew_comes_after_what_was_before(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "trace"
    folder.mkdir(parents=True)
    head = {"format": 1, "pid": 3, "host": "h", "lost": 0}
    night = 10**14  # by the clock on the wall the second boot came so much after the first
    one, two = {"boot": "one", "born": 9 * 10**13, "wall": 10**18}, {"boot": "two", "born": 5, "wall": 10**18 + night}
    far = {"boot": "far", "born": 1005, "wall": 10**18 + night - 1000}
    files = {
        "replay@1-3": [head | one | {"role": "replay server"}, ["admit", MAIN, 9 * 10**13, 9 * 10**13, {"group": 4}]],
        "replay@2-3": [head | two | {"role": "replay server"}, ["lease", MAIN, 20, 20, {"group": 4}]],
        "rollout@2-3": [
            head | far | {"role": "rollout-0"},
            {"server": "two", "at": 1005, "offset": -1000, "error": 1},
            ["insert", MAIN, 1010, 1012, {"group": 4}],
        ],
    }
    for name, rows in files.items():
        (folder / f"{name}.spans").write_bytes(b"".join(msgpack.packb(row) or b"" for row in rows))
    life = life_of(read_trace(tmp_path), group=4)
    assert [(span.name, span.begin) for _, span in life] == [
        ("admit", 9 * 10**13), ("insert", night + 10), ("lease", night + 20),
    ]  # fmt: skip


def test_round_trips_tell_how_clocks_differ_to_half_of_a_trip(tmp_path: Path) -> None:
    now = {"mine": 0}
    ahead, skew = 5_000_000_000, 3_000_000_000
    clocks = Clocks(lambda: now["mine"], lambda: now["mine"])
    rng = np.random.default_rng(0)
    for number in range(50):
        there, back = (int(each) for each in rng.exponential(1_000_000, 2))
        now["mine"] += 1_000_000_000
        clocks.sent(number)
        now["mine"] += there
        server = ServerTime("elsewhere", now["mine"] + ahead, now["mine"] + skew)
        now["mine"] += back
        clocks.heard(number, server)
        clocks.heard(number, server)  # once more: it counts once
    error, found = min(clocks._trips)
    assert abs(found - skew) <= error < 1_000_000
    assert clocks.stats()["clock_skew_s"] == pytest.approx(3.0, abs=1e-3)


def test_the_command_says_what_it_read_and_what_became_of_a_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "telemetry.trace=true" in capsys.readouterr().err
    folder = tmp_path / "logs" / "trace"
    folder.mkdir(parents=True)
    head = {"format": 1, "role": "learner 0", "pid": 3, "host": "h", "boot": "b", "born": 0, "wall": 0, "lost": 2}
    rows = [head, ["start", MAIN, 0, 10**9, {}], ["forward", MAIN, 10**9, 2 * 10**9, {"groups": [4]}]]
    (folder / "a@1-2.spans").write_bytes(b"".join(msgpack.packb(row) or b"" for row in rows))
    assert main(["trace", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "learner 0 (pid 3, h): 2 spans in 2.0 s, 100.0% of them accounted for; 2 spans were lost" in said
    assert [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]][
        -1
    ] == "forward"
    assert main(["trace", str(tmp_path), "--group", "4"]) == 0
    assert "learner 0: forward" in capsys.readouterr().out
    assert main(["trace", str(tmp_path), "--version", "4"]) == 2
    assert "version 4" in capsys.readouterr().err
    assert [each.role for each in read_trace(tmp_path)] == ["learner 0"]
