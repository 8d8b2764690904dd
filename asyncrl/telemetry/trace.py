"""Puts the spans of all processes of a run on one clock: `asyncrl trace RUN`.

    logs/trace/*.spans -> processes -> times of the replay server's machine -> tracks on which spans nest -> JSON

Lane `main` of each process has no gaps: its spans add up to the lifetime of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from asyncrl import spans
from asyncrl.config import LOG_DIR
from asyncrl.errors import RunFolderError

GROUP, VERSION = 1 << 51, 2 << 51
"""Offsets that are added to the id of a group or a version to get the number of its flow: below 2^53, up to which
every reader of JSON has exact numbers."""


AROUND = ("group", "environment", "fetch the batch")
"""Spans that contain stages of a group, or began before it, and are not stages themselves."""


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    lane: str
    begin: int
    end: int
    """ns; equal to `begin` for an instant."""
    of: dict[str, Any]

    def groups(self) -> list[int]:
        """Return the ids of the span's groups."""
        return [*self.of.get("groups", ()), *([self.of["group"]] if "group" in self.of else [])]

    def flows(self) -> list[int]:
        """Return the flows that link the span to spans of other processes."""
        linked = [GROUP + group for group in self.groups()] if self.name not in AROUND else []
        return linked + ([VERSION + self.of["version"]] if self.of.get("version", -1) >= 0 and versioned(self) else [])

    def unit(self) -> tuple[Any, ...]:
        """Return the key of spans that stay together on one track."""
        return tuple(self.of.get(key) for key in ("group", "attempt", "evaluation"))


def versioned(span: Span) -> bool:
    """Return whether the span is a stage of its version. A training step only uses a version."""
    return span.name != "train step"


@dataclass(slots=True)
class Process:
    role: str
    pid: int
    host: str
    boot: str
    born: int
    spans: list[Span] = field(default_factory=list)
    lost: int = 0
    """Number of spans lost because the disk was full."""
    clocks: list[tuple[int, int, int]] = field(default_factory=list)
    """`(at, offset, error)` in ns: offset of the replay server's clock from this process's."""
    wall: int = 0
    """Time at which its clock began, in ns since the epoch."""
    server: str = ""
    """Boot id of the machine to whose clock it is aligned, the replay server's."""

    @property
    def begin(self) -> int:
        return min(self.born, *(span.begin for span in self.spans)) if self.spans else self.born

    @property
    def end(self) -> int:
        return max((span.end for span in self.spans), default=self.born)

    def accounted(self) -> float:
        """Return the fraction of its time, from its start to the end of its last span, that its main lane covers."""
        covered = at = 0
        for span in sorted((span for span in self.spans if span.lane == spans.MAIN), key=lambda span: span.begin):
            covered += max(0, span.end - max(span.begin, at))
            at = max(at, span.end)
        return covered / (self.end - self.begin) if self.end > self.begin else 1.0


def read_trace(folder: Path) -> list[Process]:
    """Return every process that left spans, sorted by role and start, on the clock of the replay server's machine.

    Raises:
        RunFolderError: there are no spans.
    """
    found: dict[str, Process] = {}
    for path in sorted((folder / LOG_DIR / spans.FOLDER).glob(f"*{spans.SUFFIX}")):
        key = path.name.removesuffix(spans.SUFFIX).removesuffix(".older")
        known = read_spans(path, found.get(key))
        if known is not None:
            found[key] = known
    if not found:
        raise RunFolderError(
            f"{folder} has no spans in {LOG_DIR}/{spans.FOLDER}: start a run with telemetry.trace=true. Processes on "
            "other machines write their spans there; copy those files into this folder"
        )
    for process in found.values():
        align(process)
    join_boots(list(found.values()))
    return sorted(found.values(), key=lambda process: (process.role, process.born))


def read_spans(path: Path, known: Process | None) -> Process | None:
    """Read one file up to the first damaged record: a machine that died may leave an incomplete one."""
    for row in records(path):
        match row:
            case {"format": spans.FORMAT, "role": str(role), "pid": int(pid), "host": str(host), **rest}:
                match rest:
                    case {"boot": str(boot), "born": int(born), "lost": int(lost), "wall": int(wall)}:
                        known = known or Process(role, pid, host, boot, born, wall=wall, server=boot)
                        known.lost = max(known.lost, lost)
                    case _:
                        return known
            case _ if known is None:
                return None  # another format, or the head was not written for lack of space
            case {"server": str(server), "at": int(at), "offset": int(offset), "error": int(error)}:
                if server != known.boot:
                    known.clocks.append((at, offset, error))
                    known.server = server
            case [str(name), str(lane), int(begin), int(end), dict(of)] if is_told(of):
                known.spans.append(Span(name, lane, begin, end, of))
            case _:
                return known
    return known


def is_told(of: dict[Any, Any]) -> bool:
    """Return whether these are valid notes of a span: texts and numbers by name, with ids that are not negative."""
    plain = {name: value for name, value in of.items() if name != "groups"}
    groups = of.get("groups", [])
    return (
        all(isinstance(name, str) and isinstance(value, str | int | float | None) for name, value in plain.items())
        and isinstance(groups, list)
        and all(isinstance(each, int) and each >= 0 for each in [*groups, of.get("group", 0)])
        and isinstance(of.get("version", 0), int)
    )


def records(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        found = msgpack.Unpacker(file, strict_map_key=False)
        try:
            yield from found
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException):  # TypeError: an unhashable key
            return


def align(process: Process) -> None:
    """Shift a process to the replay server's clock if that is another one, by the offset at each time. Between two
    measurements the offset is interpolated linearly, so that no order changes."""
    if process.clocks:
        process.clocks.sort()

        move(process, lambda time: time + offset_at(process.clocks, time))
        process.wall -= process.clocks[0][1]


def move(process: Process, to: Callable[[int], int]) -> None:
    process.born = to(process.born)
    process.spans = [Span(s.name, s.lane, to(s.begin), to(s.end), s.of) for s in process.spans]


def join_boots(processes: Sequence[Process]) -> None:
    """Align processes of different boots: each boot of a machine restarts its clock, and so does a resume on another
    machine. Later processes are shifted to the first one's clock, by the difference of the wall clocks."""
    walls: dict[str, int] = {}
    for process in sorted(processes, key=lambda each: each.boot != each.server):  # on the server's machine first
        walls.setdefault(process.server, process.wall)
    first = walls[min(processes, key=lambda each: each.begin + walls[each.server]).server]
    for process in processes:
        if (later := walls[process.server] - first) > 0:
            move(process, later.__add__)


def offset_at(clocks: Sequence[tuple[int, int, int]], time: int) -> int:
    """Return the offset in ns, linear between the two nearest measurements, and constant outside of them."""
    later = next((place for place, (at, _, _) in enumerate(clocks) if at >= time), len(clocks))
    if later in (0, len(clocks)):
        return clocks[min(later, len(clocks) - 1)][1]
    (left, low, _), (right, high, _) = clocks[later - 1], clocks[later]
    return round(low + (high - low) * (time - left) / max(1, right - left))


def tracks(process: Process) -> list[tuple[str, list[Span]]]:
    """Return `(name, spans)` of tracks, such that spans of one track are nested or disjoint. The spans of a group stay
    on one track, except for those of siblings at the same time."""
    lanes: dict[str, dict[tuple[Any, ...], list[Span]]] = {}
    for span in process.spans:
        lanes.setdefault(span.lane, {}).setdefault(span.unit(), []).append(span)
    found: list[tuple[str, list[Span]]] = []
    for lane, units in sorted(lanes.items(), key=lambda item: (item[0] != spans.MAIN, item[0])):
        places: list[tuple[int, list[Span]]] = []
        """For each track of the lane: the time at which it is free again, and its spans."""
        rows = [row for unit in units.values() for row in nested(unit)]
        for row in sorted(rows, key=lambda row: row[0].begin):
            free = next((place for place, (until, _) in enumerate(places) if until <= row[0].begin), len(places))
            on_it = places[free][1] if free < len(places) else []
            places[free : free + 1] = [(max(span.end for span in row), [*on_it, *row])]
        found += [(lane if len(places) == 1 else f"{lane} {place + 1}", row) for place, (_, row) in enumerate(places)]
    return found


def nested(unit: Iterable[Span]) -> list[list[Span]]:
    """Divide spans into rows in which they are nested or disjoint, as few as possible, each sorted by begin."""
    rows: list[tuple[list[int], list[Span]]] = []
    for span in sorted(unit, key=lambda span: (span.begin, -span.end)):
        for row in rows:
            ends = row[0]
            while ends and ends[-1] <= span.begin and ends[-1] < span.end:
                ends.pop()
            if not ends or ends[-1] >= span.end:
                break
        else:
            row = [], []
            rows.append(row)
        row[0].append(span.end)
        row[1].append(span)
    return [row for _, row in rows]


def chrome_events(processes: Sequence[Process]) -> Iterator[dict[str, Any]]:
    """Iterate over the events of the whole trace in Chrome's JSON format ("Trace Event Format"): names of processes and
    tracks, a complete event (`X`) per span, and a flow event (`s`, `t`, `f`) right after each span that a flow links.

    Times are in microseconds since the first process began. An instant is 1 ns long, because a flow cannot end at
    nothing. Processes are numbered: their pids may be the same on two machines.
    """
    origin = min((process.begin for process in processes), default=0)
    several = len({process.host for process in processes}) > 1
    phases = flow_phases(processes)
    for pid, process in enumerate(processes, 1):
        host = f" on {process.host}" if several else ""
        yield _name("process", pid, 0, f"{process.role}{host} (pid {process.pid})", pid)
        for tid, (name, row) in enumerate(tracks(process), 1):
            yield _name("thread", pid, tid, name, tid)
            for span in sorted(row, key=lambda span: (span.begin, -span.end)):
                at = {"pid": pid, "tid": tid, "ts": (span.begin - origin) / 1000}
                yield at | {"ph": "X", "name": span.name, "dur": max(1, span.end - span.begin) / 1000, "args": span.of}
                for flow, phase in phases.get(id(span), ()):
                    kind = "group" if flow < VERSION else "version"
                    yield at | {"ph": phase, "id": flow, "name": kind, "cat": kind, "bp": "e"}


def flow_phases(processes: Sequence[Process]) -> dict[int, list[tuple[int, str]]]:
    """Return `id(span)` -> `(flow, phase)` of its flows: `s` where one starts, `f` where it finishes, `t` between."""
    linked: dict[int, list[Span]] = {}
    for span in sorted((span for process in processes for span in process.spans), key=lambda span: span.begin):
        for flow in span.flows():
            linked.setdefault(flow, []).append(span)
    found: dict[int, list[tuple[int, str]]] = {}
    for flow, way in linked.items():
        for place, span in enumerate(way if len(way) > 1 else ()):
            phase = "s" if place == 0 else "f" if place == len(way) - 1 else "t"
            found.setdefault(id(span), []).append((flow, phase))
    return found


def _name(what: str, pid: int, tid: int, name: str, place: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name, "sort_index": place}}


def life_of(processes: Sequence[Process], *, group: int = -1, version: int = -1) -> list[tuple[Process, Span]]:
    """Return the spans of a group or a version in all processes, by time."""
    found = [
        (process, span)
        for process in processes
        for span in process.spans
        if group in span.groups() or (version >= 0 and span.of.get("version") == version and versioned(span))
    ]
    return sorted(found, key=lambda pair: (pair[1].begin, -pair[1].end))
