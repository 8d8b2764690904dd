"""`asyncrl metrics [WORD ...]`: lists metrics from the registry. `--markdown` prints the page docs/metrics.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from asyncrl.errors import ConfigError
from asyncrl.telemetry.metrics.metric import Metric
from asyncrl.telemetry.metrics.registry import METRICS

HEAD = """# Metrics

Made by `asyncrl metrics --markdown > docs/metrics.md` from `asyncrl/telemetry/metrics/of_steps.py` and
`asyncrl/telemetry/metrics/of_runs.py`: change those, not this page.
On the command line `asyncrl metrics WORD` shows those whose name or meaning has the word.

`metrics.jsonl` has a row for each step and one for each evaluation. Besides metrics a row has `step`, `policy_version`
(the version that the step published) and `time` (seconds since the epoch).

- *unit*: `share` is a number from 0 to 1; `1` is a plain number.
- *better*: whether a run wants it higher or lower, other things being equal.
- *total*: counted since the process that counts it started, so it begins at 0 again after a resume. All others are of
  the step, or of the moment.

A value that is not finite is `null`.

`histograms.jsonl` has a row for each step with the `histogram/*`: `edges`, and the `counts` between them (one fewer).
W&B and TensorBoard get them as histograms.
"""


def matching(words: Sequence[str]) -> list[Metric]:
    """Return the metrics whose name or meaning contains every word."""
    wanted = [word.lower() for word in words]
    return [metric for metric in METRICS if all(word in f"{metric.name} {metric.meaning}".lower() for word in wanted)]


def as_markdown(metrics: Sequence[Metric] = METRICS) -> str:
    """Return the page docs/metrics.md."""
    parts = [HEAD]
    for room in sorted({metric.room for metric in metrics}):
        parts.append(f"\n## {room}\n\n| metric | unit | meaning | better | total |\n|---|---|---|---|---|\n")
        for metric in metrics:
            if metric.room == room:
                cells = (metric.unit, metric.meaning, metric.better, "yes" if metric.total else "")
                parts.append(
                    f"| `{metric.name}` | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
                )
    return "".join(parts)


def as_text(metrics: Sequence[Metric]) -> str:
    """Return two lines per metric."""
    lines = []
    for metric in metrics:
        said = [metric.unit, f"{metric.better} is better" if metric.better else "", "total" if metric.total else ""]
        lines += [f"{metric.name}  ({', '.join(filter(None, said))})", f"    {metric.meaning}"]
    return "\n".join(lines)


def main(words: Sequence[str], *, markdown: bool) -> int:
    """Raises ConfigError: no metric matches."""
    found = matching(words)
    if not found:
        raise ConfigError(f"no metric has {' and '.join(words)} in its name or meaning. `asyncrl metrics` lists all")
    sys.stdout.write(as_markdown(found)) if markdown else print(as_text(found))
    return 0
