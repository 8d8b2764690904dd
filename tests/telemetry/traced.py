"""Checks that hold for the trace of any run, as perfetto's own classes read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from asyncrl.telemetry.trace import GROUP, VERSION, Process, as_perfetto, life_of, read_trace


def parsed(processes: Sequence[Process]) -> tuple[dict[int, Any], list[Any]]:
    """Return track descriptors by uuid, and the events."""
    trace = proto.Trace()
    trace.ParseFromString(b"".join(as_perfetto(processes)))
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    return tracks, [packet for packet in trace.packet if packet.HasField("track_event")]


def assert_nests(events: Sequence[Any], tracks: dict[int, Any]) -> list[tuple[int, int, int, Any]]:
    """Check that on each track times never go back, and that each end closes the slice that began last.

    Returns:
        `(track, begin, end, event)` of every slice.
    """
    open_: dict[int, list[Any]] = defaultdict(list)
    last: dict[int, int] = defaultdict(int)
    found = []
    for packet in events:
        event, at = packet.track_event, packet.timestamp
        assert event.track_uuid in tracks and at >= last[event.track_uuid]
        last[event.track_uuid] = at
        if event.type == event.TYPE_SLICE_BEGIN:
            open_[event.track_uuid].append(packet)
        elif event.type == event.TYPE_SLICE_END:
            begun = open_[event.track_uuid].pop()
            found.append((event.track_uuid, begun.timestamp, at, begun.track_event))
        else:
            found.append((event.track_uuid, at, at, event))
    assert not any(open_.values())
    return found


def assert_run_is_traced(run_dir: Path, roles: Sequence[str]) -> None:
    """Check that every process is in the trace and its time accounted for, and that flows follow a group and a version
    through the run."""
    processes = read_trace(run_dir)
    assert sorted(process.role.split("@")[0] for process in processes) == sorted(roles)
    assert {process.role: process.accounted() for process in processes if process.accounted() < 0.98} == {}
    tracks, events = parsed(processes)
    slices = assert_nests(events, tracks)
    assert sum(len(process.spans) for process in processes) == len(slices)

    def stations(flow: int) -> list[str]:
        linked = [(begin, event.name) for _, begin, _, event in slices if flow in event.flow_ids]
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
