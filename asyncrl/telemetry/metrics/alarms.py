"""Alarms: conditions in the rows of a run that need attention. Each has a name, a sentence and advice.

They depend only on rows and a given clock: the learner checks each row that it writes, and live views check how long
ago the last row arrived (`Stall`). An alarm is reported when its condition begins to hold and, once it has not held for
`WINDOW` rows, as over; the next time this takes twice as many rows, and so on, so that an alarm that fluctuates around
its limit is reported only a few times. After a resume, the first rows are those written from then on.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.telemetry.metrics.raised import Raised

Row = Mapping[str, Any]

WINDOW = 10
"""Number of steps over which means are taken, at the beginning and at the end."""
GAP_STEPS, GAP_S = 10, 120.0
"""A stall is the absence of a step for this multiple of the median of the last ones, and at least this many seconds."""
FREE_BYTES = "disk/free_bytes"
"""Value added to a row by its writer; not a metric."""


@dataclass(slots=True)
class ActiveAlarm:
    """A reported alarm that is not over: the step at which it began, the last at which it held, and the rows since."""

    first: int
    last: int
    quiet: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation, with the reward of the batches at that time."""

    value: float
    low: float | None
    high: float | None
    """Upper end of its interval, as `low` is the lower end; None if the row does not have it."""
    reward: float | None
    """Mean reward over the last `WINDOW` steps; None if there are fewer."""
    error: float
    """Standard error of `reward`."""


@dataclass(slots=True)
class RunHistory:
    """The history of a run that alarms need: its first rows, its last ones, its evaluations."""

    first: list[Row] = field(default_factory=list)
    last: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    evaluations: dict[str, list[Point]] = field(default_factory=dict)
    """By metric."""
    served: bool = False
    """Whether a worker was connected before. A resume trains on the buffered groups before the first one connects."""

    def add(self, row: Row) -> None:
        self.served |= bool(row.get("replay/workers"))
        if "time/step" not in row:
            for name, value in row.items():
                if name.startswith("eval/") and name.endswith(("/accuracy", "/reward")) and value is not None:
                    ends = row.get(f"{name}_low"), row.get(f"{name}_high")
                    self.evaluations.setdefault(name, []).append(Point(value, *ends, *reward_of(self.last)))
            return
        if len(self.first) < WINDOW:
            self.first.append(row)
        self.last.append(row)

    def began(self, name: str) -> float | None:
        return mean_of(self.first, name)

    def now(self, name: str) -> float | None:
        return mean_of(self.last, name)

    def grew(self, name: str, kept: bool) -> float:
        """Return by how much a total grew over the last rows. It starts from 0 before the first row, unless it is
        `kept` over a resume, and from 0 again after a restart."""
        values = [row[name] for row in self.last if row.get(name) is not None]
        if self.first and self.last[0] is self.first[0] and (self.first[0]["step"] == 1 or not kept):
            values.insert(0, 0.0)
        return sum(max(0.0, after - before) for before, after in itertools.pairwise(values))


def mean_of(rows: Sequence[Row] | deque[Row], name: str) -> float | None:
    """Return the mean over a whole window; None if fewer rows have a value."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.fmean(values) if len(values) == WINDOW else None


def reward_of(rows: Sequence[Row] | deque[Row]) -> tuple[float | None, float]:
    """Return the mean reward of these batches with its standard error; the mean is None for less than a window."""
    values = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    if len(values) < WINDOW:
        return None, 0.0
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


MEAN, NEWEST, GROWTH, GROWTH_OF_RUN = "mean", "newest", "growth", "growth of run"
"""What is compared with a threshold: the mean over the last rows, the value of the last row, or the growth of a total
over the last rows: of one that counts from 0 at each start, or of one that is kept over a resume."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A condition on one metric."""

    metric: str
    of: str
    """One of `MEAN`, `NEWEST`, `GROWTH`, `GROWTH_OF_RUN`."""
    side: str
    """`above` or `below` the limit is where the condition holds."""
    limit: float
    said: str = f"{{metric}} is {{value:.3g}} over the last {WINDOW} steps, {{side}} {{limit:g}}"

    def __call__(self, history: RunHistory) -> str:
        value = self._value(history)
        if value is None or not (value > self.limit if self.side == "above" else value < self.limit):
            return ""
        return self.said.format(
            metric=self.metric, value=value, side=self.side, limit=self.limit, gib=value / 2**30, steps=WINDOW
        )

    def _value(self, history: RunHistory) -> float | None:
        if self.of == MEAN:
            return history.now(self.metric)
        if self.of == NEWEST:
            return history.last[-1].get(self.metric) if history.last else None
        return history.grew(self.metric, kept=self.of == GROWTH_OF_RUN)


def entropy_collapse(history: RunHistory) -> str:
    began, now = history.began("policy/entropy"), history.now("policy/entropy")
    explores = history.now("reward/mean") is not None  # supervised rows have nothing to explore
    if began is None or now is None or began <= 0 or now >= 0.02 * began or not explores:
        return ""
    return f"the policy's entropy is {now:.3g} nats; it was {began:.3g} in the first {WINDOW} steps"


def length_runaway(history: RunHistory) -> str:
    was, length = history.began("completion/length_mean"), history.now("completion/length_mean")
    earned, reward = history.began("reward/mean"), history.now("reward/mean")
    if was is None or length is None or earned is None or reward is None:
        return ""
    if length < 2 * was or reward > earned + 0.01:
        return ""
    return f"completions have {length:.0f} tokens on average, up from {was:.0f}, without a higher reward"


def reward_hacking(history: RunHistory) -> str:
    """Holds if the last two evaluations are clearly below the best one before, and the batches' reward rose."""
    for name, points in history.evaluations.items():
        if len(points) < 3:
            continue
        best = max(points[:-2], key=lambda point: point.value)
        if best.reward is None:  # evaluated before a whole window of steps: use the first steps
            best = Point(best.value, best.low, best.high, *reward_of(history.first))
        last = points[-1]
        if all(fell(best, point) for point in points[-2:]) and rose(best, last):
            return (
                f"{name} fell from {best.value:.3g} (at least {best.low:.3g}) to {last.value:.3g} (at most "
                f"{last.high:.3g}) while the reward rose from {best.reward:.3g} to {last.reward:.3g}"
            )
    return ""


def fell(best: Point, point: Point) -> bool:
    """Return whether the value fell by a tenth, and by more than the sampling of rows: the intervals are disjoint."""
    apart = best.low is not None and point.high is not None and point.high < best.low
    return apart and best.value > 0 and point.value < 0.9 * best.value


def rose(before: Point, now: Point) -> bool:
    """Return whether the reward of the batches rose by more than two standard errors of the difference."""
    if before.reward is None or now.reward is None:
        return False
    return now.reward - before.reward > 2 * math.hypot(before.error, now.error)


def no_workers(history: RunHistory) -> str:
    workers = history.last[-1].get("replay/workers") if history.last else None
    return "no rollout worker is connected" if workers == 0 and history.served else ""


GREW = "{metric} grew by {value:g} over the last {steps} steps"


@dataclass(frozen=True, slots=True)
class Alarm:
    name: str
    meaning: str
    advice: str
    holds: Callable[[RunHistory], str]
    """Returns a description of the condition if it holds; empty otherwise."""


STALL = Alarm(
    "stall",
    f"no step has ended for {GAP_STEPS} times the usual duration of a step, and for at least {GAP_S:.0f} s",
    "Look in logs/ for the process that is silent. `asyncrl local` names processes that are stopped",
    lambda _: "",
)
ALARMS: tuple[Alarm, ...] = (
    STALL,
    Alarm(
        "engine_drift",
        "the root mean square log-ratio of tokens that are 0 versions old is above 0.3: for the same weights, the "
        "engine computes other log-probs than the learner",
        "`asyncrl verify RUN` shows which engine it is. "
        "Several updates per batch at a high learning rate have the same symptom: look at ratio/B",
        Threshold("staleness/age_0/rms_log_ratio", MEAN, "above", 0.3),
    ),
    Alarm(
        "canary_failed",
        "the log-probs that an engine computed for the probe tokens were not those of the learner",
        "The engine generates nothing until they are. See logs/rollout-*.log and docs/weights.md",
        Threshold("weights/canary_failed", GROWTH, "above", 0, GREW),
    ),
    Alarm(
        "low_ess",
        "the effective sample size of the sequences is below 0.3: most of a batch has almost no effect",
        "Lower replay.pipeline_depth or learner.lr, or use a loss that bounds the ratio",
        Threshold("ratio/E/ess_seq", MEAN, "below", 0.3),
    ),
    Alarm(
        "entropy_collapse",
        "the policy's entropy is below 2 % of its initial value: it hardly explores any more",
        "Lower learner.lr, raise the clip range's upper bound, or add a KL to the reference policy",
        entropy_collapse,
    ),
    Alarm(
        "zero_variance",
        "in more than 80 % of the groups of a batch all members have the same reward, so that they give no gradient",
        "Set rollout.drop_zero_variance=true, use harder or easier rows (data.curriculum), or raise rollout.group_size",
        Threshold("reward/zero_variance_groups", MEAN, "above", 0.8),
    ),
    Alarm(
        "length_runaway",
        "completions are at least twice as long as in the first steps, without a higher reward",
        "Look at samples.jsonl. Use a loss that does not favour length (dr_grpo), or penalise length in the reward",
        length_runaway,
    ),
    Alarm(
        "truncated",
        "more than half of the completions are cut off at the length limit",
        "Raise rollout.max_new_tokens, or penalise truncated completions in the reward",
        Threshold("completion/truncated", MEAN, "above", 0.5),
    ),
    Alarm(
        "reward_hacking",
        "two evaluations in a row were at least a tenth below the best one, and their 95 % intervals end below its "
        "interval, while the reward of the batches rose by more than two standard errors. Evaluations on so few rows "
        "that the intervals overlap raise no alarm: eval.rows makes the intervals narrower",
        "Read samples.jsonl to see what the reward pays for. learner.keep_best keeps the best checkpoint",
        reward_hacking,
    ),
    Alarm(
        "nonfinite",
        "optimizer steps are skipped because their loss or gradient is not finite",
        "The batches are in nonfinite/ in the run folder. Lower learner.lr or learner.clip_norm",
        Threshold("optim/nonfinite_steps", GROWTH_OF_RUN, "above", 0, GREW),
    ),
    Alarm(
        "no_workers",
        "rollout workers were connected before, but none is connected now",
        "See logs/rollout.log. The learner trains on the groups in the buffer, then it waits",
        no_workers,
    ),
    Alarm(
        "other_code",
        "a file of yours (reward, environment, filter), or one that it imports from its folder, is on a rollout worker "
        "not the one that the learner's machine had at the start of the learner: training mixes groups of both",
        "logs/rollout-*.log names the file. Copy the learner's version there and restart that pool, or resume the run",
        Threshold(
            *("replay/workers_other_code", NEWEST, "above", 0),
            "{value:.0f} rollout worker(s) run another version of your code than the learner",
        ),
    ),
    Alarm(
        "disk",
        "less than 2 GiB are free on the disk of the run folder",
        "Free space: a full disk ends the run. Lower learner.keep_checkpoints, or set replay.journal.retain=none",
        Threshold(FREE_BYTES, NEWEST, "below", 2 << 30, "the run folder's disk has only {gib:.1f} GiB free"),
    ),
    Alarm(
        "memory",
        "less than 5 % of the memory is free on a machine of the run, or in a container: the kernel may soon kill a "
        "process",
        "Lower replay.max_bytes, engine.max_sequences, rollout.max_in_flight or rollout.workers, whichever uses it",
        Threshold(
            *("machine/memory_free", NEWEST, "below", 0.05),
            "a machine of the run has only {value:.1%} of memory free",
        ),
    ),
    Alarm(
        "clock",
        "the clock of a machine differs by more than a second from that of the replay server: times in its logs and "
        "files cannot be compared with those of other machines. Training does not depend on it",
        "Synchronise the clocks of all machines with one time service (chrony, ntp)",
        Threshold(
            *("machine/clock_skew_s", NEWEST, "above", 1.0),
            "a machine's clock differs by {value:.1f} s or more from that of the replay server",
        ),
    ),
)


class Stall:
    """The alarm that needs a clock; each viewer has its own. Call `row` for every row, and `silence` regularly."""

    def __init__(self, ignored: Sequence[str] = ()) -> None:
        self._ignored = STALL.name in ignored
        self._took: deque[float] = deque(maxlen=WINDOW)
        """Durations of the last steps in seconds."""
        self._since: float | None = None
        self._step = 0
        self._holds = False

    def row(self, row: Row, now: float) -> list[Raised]:
        """Note a row that arrived at `now`, in seconds of any clock. Returns the end of a stall, if there was one."""
        self._took.extend([row["time/step"]] if "time/step" in row else [])
        silent, self._since = now - (self._since or 0.0), now
        self._step = max(self._step, row["step"])
        over = [Raised(STALL.name, self._step, f"over after {silent:.0f} s: a step has ended", over=1)]
        held, self._holds = self._holds, False
        return over if held else []

    def silence(self, now: float) -> list[Raised]:
        """Check at `now` how long no row has arrived. Returns a stall, if one has begun."""
        if self._since is None or not self._took or self._holds or self._ignored:
            return []
        usual, waited = statistics.median(self._took), now - self._since
        self._holds = waited > max(GAP_S, GAP_STEPS * usual)
        said = f"no step has ended for {waited:.0f} s; one usually takes {usual:.1f} s"
        return [Raised(STALL.name, self._step, said, STALL.advice)] if self._holds else []


class Alarms:
    """All alarms that depend on rows, except those `ignored` by name. Call `row` for every row.

    Raises:
        ConfigError: an ignored name is not that of an alarm.
    """

    def __init__(self, ignored: Sequence[str] = ()) -> None:
        unknown = sorted(set(ignored) - {alarm.name for alarm in ALARMS})
        if unknown:
            raise ConfigError(
                f"telemetry.ignore_alarms={unknown}: there is no such alarm. The alarms are "
                f"{', '.join(alarm.name for alarm in ALARMS)}"
            )
        self._ignored = ignored
        self._history = RunHistory()
        self._known: dict[str, ActiveAlarm] = {}
        self._patience: dict[str, int] = {}
        """Number of rows without its condition after which an alarm is over. Doubles each time it is reported."""
        self._step = 0

    def row(self, row: Row) -> list[Raised]:
        """Note a row. Returns the alarms that have begun or are over."""
        self._history.add(row)
        self._step = max(self._step, row["step"])
        found = ((alarm, alarm.holds(self._history)) for alarm in ALARMS)
        return [raised for alarm, said in found if (raised := self._report(alarm, said))]

    def _report(self, alarm: Alarm, said: str) -> Raised | None:
        """Return what to report of an alarm; None unless it begins to hold, or is over."""
        if alarm.name in self._ignored:
            return None
        known = self._known.get(alarm.name)
        if not said:
            return self._over(alarm, known) if known else None
        if known:
            known.last, known.quiet = self._step, 0
            return None
        self._known[alarm.name] = ActiveAlarm(self._step, self._step)
        self._patience[alarm.name] = 2 * self._patience.get(alarm.name, WINDOW // 2)
        return Raised(alarm.name, self._step, said, alarm.advice)

    def _over(self, alarm: Alarm, known: ActiveAlarm) -> Raised | None:
        known.quiet += 1
        if known.quiet <= self._patience[alarm.name]:
            return None
        del self._known[alarm.name]
        held = known.last - known.first + 1
        said = f"over after {held} steps; it last held at step {known.last}"
        return Raised(alarm.name, self._step, said, over=held)
