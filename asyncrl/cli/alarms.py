"""`asyncrl alarms`: lists alarms with their meaning and advice. `--markdown` prints the page docs/alarms.md."""

from __future__ import annotations

import sys

from asyncrl.telemetry.metrics.alarms import ALARMS, WINDOW
from asyncrl.telemetry.metrics.raised import PASSING

HEAD = f"""# Alarms

Made by `asyncrl alarms --markdown > docs/alarms.md` from `asyncrl/telemetry/metrics/alarms.py`: change that,
not this page.

The learner looks at every row that it writes. An alarm is printed, and written into `alarms.jsonl` of the run folder,
when it begins to hold, and again when it is over, after how many steps: once it has not held for {WINDOW}, the next
time for {2 * WINDOW}, and so on. Means are over the last {WINDOW} steps, against the first {WINDOW} since the start or
resume. `stall`, for which no row comes, is told by `asyncrl local` while it holds, and written with the row that
ends it. With `telemetry.on_alarm=stop` any of them but {" and ".join(PASSING)} has the learner save a checkpoint and
end: exit code 1 of `asyncrl local`, and `resume=auto` goes on. `telemetry.ignore_alarms` has the names of
those that are not wanted.
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
