"""Checks that hold for the trace of any run, as a reader of Chrome's format sees it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.telemetry.trace import GROUP, VERSION, Process, chrome_events, life_of, read_trace


@dataclass(frozen=True)
class Slice:
    track: tuple[int, int]
    begin: int
    end: int
    """ns since the trace began."""
    name: str
    args: dict[str, Any]
    flows: tuple[int, ...]


def parsed(processes: Sequence[Process]) -> tuple[dict[tuple[int, int], str], list[Slice]]:
    """Return the names of tracks (of processes, at track 0), and the slices with the flows that are bound to them: a
    flow event belongs to the slice before it, which begins at the same time on the same track."""
    names: dict[tuple[int, int], str] = {}
    found: list[Slice] = []
    for event in json.loads(json.dumps(list(chrome_events(processes)))):
        track = event["pid"], event["tid"]
        if event["ph"] == "M":
            names[track] = event["args"]["name"]
            continue
        begin = round(event["ts"] * 1000)
        if event["ph"] == "X":
            found.append(Slice(track, begin, begin + round(event["dur"] * 1000), event["name"], event["args"], ()))
        else:
            assert event["bp"] == "e" and event["ph"] in "stf"
            assert (found[-1].track, found[-1].begin) == (track, begin)
            found[-1] = replace(found[-1], flows=(*found[-1].flows, event["id"]))
    return names, found


def assert_nests(slices: Sequence[Slice], names: dict[tuple[int, int], str]) -> None:
    """Check that on each track times never go back, and that slices are nested or disjoint."""
    open_: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    last: dict[tuple[int, int], int] = defaultdict(int)
    for each in slices:
        assert each.track in names and each.begin >= last[each.track]
        last[each.track] = each.begin
        around = open_[each.track]
        while around and around[-1].end <= each.begin:
            around.pop()
        assert not around or each.end <= around[-1].end
        around.append(each)


def assert_run_is_traced(run_dir: Path, roles: Sequence[str]) -> None:
    """Check that every process is in the trace and its time accounted for, and that flows follow a group and a version
    through the run."""
    processes = read_trace(run_dir)
    assert sorted(process.role.split("@")[0] for process in processes) == sorted(roles)
    assert {process.role: process.accounted() for process in processes if process.accounted() < 0.98} == {}
    names_of_tracks, slices = parsed(processes)
    assert_nests(slices, names_of_tracks)
    assert sum(len(process.spans) for process in processes) == len(slices)

    def stations(flow: int) -> list[str]:
        linked = [(each.begin, each.name) for each in slices if flow in each.flows]
        return [name for _, name in sorted(linked)]

    batch = next(span for process in processes for span in process.spans if span.name == "lease")
    names = stations(GROUP + batch.of["groups"][0])
    for earlier, later in zip(
        ("admit", "generate", "inserted", "lease", "forward"),
        ("generate", "inserted", "lease", "forward", "backward"),
        strict=True,
    ):
        assert names.index(earlier) < names.index(later), names
    assert "reward" in names
    assert next(name for name in stations(VERSION + 1) if name != "prove") in ("trained", "publish")
    spans = [span for process in processes for span in process.spans if span.name == "publish" and "version" in span.of]
    published = sorted({span.of["version"] for span in spans})
    lives = [[span.name for _, span in life_of(processes, version=version)] for version in published]
    served = [life for life in lives if "first token" in life]  # a version that is soon replaced may have no token
    assert 1 in published and served
    assert all(life.index("publish") < life.index("load") < life.index("first token") for life in served), served
