"""`asyncrl trace RUN`: see `asyncrl.telemetry.trace`."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.cli.arguments.output_file import refuse_no_place
from asyncrl.errors import RunFolderError
from asyncrl.storage.sealed import replace_text
from asyncrl.telemetry.trace import Process, chrome_events, life_of, read_trace

TRACE_FILE = "trace.json"


def main(folder: Path, to: Path | None, *, group: int | None, version: int | None) -> int:
    """Raises RunFolderError, ConfigError, OSError."""
    if to is not None:
        refuse_no_place("--to", to)
    processes = read_trace(folder)
    for process in processes:
        print(line_of(process))
    if group is not None or version is not None:
        tell_life(processes, group, version)
        return 0
    path = to or folder / TRACE_FILE
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in chrome_events(processes))
    content = f'{{"displayTimeUnit":"ns","traceEvents":[\n{events}\n]}}\n'
    replace_text(path, content)
    print(f"{path}: {len(content) / 1e6:.1f} MB. Open it at https://ui.perfetto.dev, which reads it in the browser")
    return 0


def line_of(process: Process) -> str:
    seconds = (process.end - process.begin) / 1e9
    clock = f"; clock known to {max(error for _, _, error in process.clocks) / 1e6:.1f} ms" if process.clocks else ""
    lost = f"; {process.lost} spans were lost" if process.lost else ""
    return (
        f"{process.role} (pid {process.pid}, {process.host}): {len(process.spans)} spans in {seconds:.1f} s, "
        f"{process.accounted():.1%} of them accounted for{clock}{lost}"
    )


def tell_life(processes: list[Process], group: int | None, version: int | None) -> None:
    """Print a line per span, in seconds since the first."""
    found = life_of(processes, group=-1 if group is None else group, version=-1 if version is None else version)
    if not found:
        which = f"group {group}" if group is not None else f"version {version}"
        raise RunFolderError(f"no span is of {which}. The newest spans are kept, 64 MB of each process")
    start = found[0][1].begin
    for process, span in found:
        notes = " ".join(f"{key}={value}" for key, value in span.of.items() if key not in ("groups", "group"))
        took = f"{(span.end - span.begin) / 1e6:10.2f} ms" if span.end > span.begin else " " * 13
        print(f"{(span.begin - start) / 1e9:9.4f} s {took}  {process.role}: {span.name} {notes}".rstrip())
