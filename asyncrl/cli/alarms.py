"""`asyncrl alarms`: lists alarms with their meaning and advice. `--markdown` prints the page docs/alarms.md."""

from __future__ import annotations

import sys

from asyncrl.telemetry.metrics.alarms import ALARMS, WINDOW
from asyncrl.telemetry.metrics.raised import PASSING

HEAD = f"""# Alarms

Made by `asyncrl alarms --markdown > docs/alarms.md` from `asyncrl/telemetry/metrics/alarms.py`: change that
file, not this page.

The learner checks every row that it writes. An alarm is printed, and written to `alarms.jsonl` in the run folder, when
it begins to hold. When it is over, this is reported too, with the number of steps for which it held. An alarm is over
once it has not held for {WINDOW} steps, the next time for {2 * WINDOW}, and so on. Means are over the last {WINDOW}
steps, and are compared with the first {WINDOW} since the start or resume. During a `stall` no row is written:
`asyncrl local` reports it while it holds, and it is written to the file with the row that ends it. With
`telemetry.on_alarm=stop`, any alarm except {" and ".join(PASSING)} makes the learner save a checkpoint and end;
`asyncrl local` then has exit code 1, and `resume=auto` continues. `telemetry.ignore_alarms` lists the names of alarms
to ignore.
"""


def as_markdown() -> str:
    return HEAD + "".join(
        f"\n## {alarm.name}\n\n{alarm.meaning[0].upper()}{alarm.meaning[1:]}.\n\n{alarm.advice}.\n" for alarm in ALARMS
    )


def main(*, markdown: bool) -> int:
    if markdown:
        sys.stdout.write(as_markdown())
        return 0
    print("\n".join(f"{alarm.name}: {alarm.meaning}\n    {alarm.advice}" for alarm in ALARMS))
    return 0
