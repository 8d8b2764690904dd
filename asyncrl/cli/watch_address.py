"""`asyncrl watch ADDRESS`: shows a run on any machine, as reported by its replay server to holders of the viewer's key.

consumes: the server's view, once a second · waits for: nobody; a silent server is reported, and given up after
`PATIENCE_S`
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from asyncrl.checks.addresses import host_of, is_everywhere
from asyncrl.errors import ConfigError, NoProgress
from asyncrl.replay.client.client import Viewer
from asyncrl.replay.protocol import PeerSeen, View
from asyncrl.settings.replay import ReplayConfig
from asyncrl.standstill import NAMED_S
from asyncrl.telemetry.live.console import LiveView, PlainConsole, facts
from asyncrl.telemetry.live.progress import by_age
from asyncrl.telemetry.live.watching import one_line
from asyncrl.telemetry.metrics.alarms import Alarms, Stall
from asyncrl.telemetry.metrics.printed import clock
from asyncrl.types import NO_VERSION

TURN_S = 1.0
PATIENCE_S = 60.0
PACE_S = 60.0
"""Seconds over which tokens and steps per second are averaged; or the last step, if that took longer."""
SAID = 6
"""Number of messages shown."""
OVER_S = 5.0
"""Seconds of silence after which the server of a finished run counts as gone."""
FOLLOWS = {
    "learner": "no step ends until it goes on",
    "worker": "after replay.heartbeat_timeout_s its groups go to others",
    "shard": "what it stores waits",
}

ABSENT = {
    "learner": "no learner is connected: no step is trained until one connects",
    "worker": "no rollout worker is connected: nothing is generated until one connects",
}


def main(address: str, keys: str) -> int:
    """Watch until the run is over, or Ctrl-C, which does not affect the run.

    Raises:
        ConfigError: there are no keys, or none of a viewer. ReplayError, NoProgress: the server refuses, or does not
            answer.
    """
    if not keys:
        raise ConfigError(
            f"asyncrl watch {address} needs --keys DIR, a folder with server.key, viewer.key and viewer.key_secret. "
            "For a run on this machine it is RUN/keys, otherwise the one that `asyncrl keys` made for the run"
        )
    host, port = host_of(address), address.rpartition(":")[2]
    if not (host and not is_everywhere(host) and 0 < int(port) < 65536) and not re.match("ipc://.", address):
        raise ConfigError(f"asyncrl watch takes a run folder, tcp://HOST:PORT or ipc://PATH; got {address!r}")
    config = ReplayConfig(address=address, keys=keys, wait_timeout_s=PATIENCE_S)
    with closing(Viewer(config)) as viewer, AddressView(address, PlainConsole(highlight=False)) as shown:
        try:
            while shown.take(viewer.view(TURN_S)):
                pass
        except NoProgress as error:
            raise NoProgress(f"{error}{shown.last_seen()}") from error
    return 0


class AddressView(LiveView):
    """A display that is redrawn on a terminal; elsewhere, a line for each step and each message."""

    def __init__(self, address: str, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._address, self._now = address, now
        self._view: View | None = None
        self._heard = now()
        self._past: deque[View] = deque()
        self._alarms, self._stall = Alarms(), Stall()
        self._stepped: View | None = None
        """The first view after the last step."""
        self._said: deque[str] = deque(maxlen=SAID)
        self._silent = set[tuple[str, str]]()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self._view is not None:
            self._console.print(one_line(self.line(self._view)), soft_wrap=True)

    def take(self, view: View | None) -> bool:
        """Show a view; None if the server has not answered yet. Returns False once the run is over."""
        before, now = self._view, self._now()
        if view is not None:
            self._view, self._heard = view, now
            self._notice(before, view)
            if before is not None:
                self._keep_pace(before, view)
            self._notice_alarms(view)
            if self._live is None and (before is None or before.trained_steps != view.trained_steps):
                self._console.print(one_line(self.line(view)), soft_wrap=True)
        elif self._view is not None and self._view.finished and now - self._heard > OVER_S:
            self.say("the run is over, and its replay server has ended")
            return False
        if self._live:
            self._live.update(Group(*self.drawn()), refresh=True)
        return True

    def last_seen(self) -> str:
        """Describe the last view, for the error about a lost server: a run may end between two views."""
        if self._view is None:
            return ""
        return (
            f". It was at step {self._view.trained_steps} when it last answered. It ends when its run ends: `asyncrl "
            "watch RUN` on its machine shows whether the run has ended"
        )

    def _keep_pace(self, before: View, view: View) -> None:
        """Keep views in which a step has just ended, since only between these there are whole numbers of steps."""
        tokens_before, tokens = (each.last.get("goodput/trained_tokens", 0.0) for each in (before, view))
        if view.trained_steps < before.trained_steps or view.clock < before.clock or tokens < tokens_before:
            self._past.clear()  # the learner went back to a checkpoint, or the server and its counters restarted
        elif view.trained_steps > before.trained_steps:
            self._past.append(view)
            while len(self._past) > 2 and view.clock - self._past[0].clock > PACE_S:
                self._past.popleft()

    def _notice_alarms(self, view: View) -> None:
        """Report the alarms that depend on what the server knows: stall, no_workers, other_code, memory and clock. The
        others need the rows that the learner writes."""
        raised = [] if view.finished else self._stall.silence(self._now())
        before = self._stepped
        if before is None or view.trained_steps != before.trained_steps:
            self._stepped = view
        if before is not None and view.trained_steps > before.trained_steps and view.clock > before.clock:
            seconds = (view.clock - before.clock) / (view.trained_steps - before.trained_steps)
            row = {**view.last, **view.now, "step": view.trained_steps, "time/step": seconds}
            raised += [*self._stall.row(row, self._now()), *self._alarms.row(row)]
        for each in raised:
            self.say(str(each))

    def say(self, text: str) -> None:
        self._said.append(text)
        if self._live is None:
            super().say(one_line(text).plain)

    def _notice(self, before: View | None, view: View) -> None:
        """Report peers that came, went or fell silent."""
        if before is not None and before.more_peers == view.more_peers == 0:
            was, now = ({(peer.role, peer.name) for peer in each.peers} for each in (before, view))
            for role, name in sorted(was - now):
                self.say(f"{role} {name} has disconnected")
            for role, name in sorted(now - was):
                self.say(f"{role} {name} has connected")
        silent = {(peer.role, peer.name): peer for peer in view.peers if peer.silent_s >= NAMED_S}
        for key in sorted(silent.keys() - self._silent):
            self.say(silence_of(silent[key]))
        self._silent = set(silent)
        if view.paused and not (before and before.paused):
            self.say(f"nothing new is admitted: {view.paused}")
        if view.finished and not (before and before.finished):
            self.say("training is finished")

    def _pace(self) -> tuple[float, float]:
        """Return steps and trained tokens per second; 0 if unknown."""
        if not self._past:
            return 0.0, 0.0
        first, last = self._past[0], self._past[-1]
        seconds = last.clock - first.clock
        if seconds <= 0:
            return 0.0, 0.0
        began, ended = (each.last.get("goodput/trained_tokens") for each in (first, last))
        trained = 0.0 if began is None or ended is None else max(0.0, ended - began)
        return (last.trained_steps - first.trained_steps) / seconds, trained / seconds

    def line(self, view: View) -> str:
        """Return `step 12 | version 13 | staleness 1.20 | tokens/s 1234 | ...`."""
        steps, tokens = self._pace()
        parts = [f"step {view.trained_steps}", f"version {view.policy_version}", f"saved {view.committed_steps}"]
        parts += [f"{1 / steps:.1f} s per step"] if steps else []
        parts += [f"staleness {mean:.2f}"] if (mean := view.last.get("staleness/mean")) is not None else []
        parts += [f"tokens/s trained {tokens:,.0f}"] if tokens else []
        made = sum(peer.tokens_per_s for peer in view.peers)
        parts += [f"generated {made:,.0f}{' or more' * (view.more_peers > 0)}"]
        return " | ".join([*parts, *(["the learner waits for a batch"] if view.waits else [])])

    def drawn(self) -> Iterator[Table | Text]:
        now, view = self._now(), self._view
        quiet = now - self._heard
        if quiet >= NAMED_S:
            yield Text(f"the replay server at {self._address} has been silent for {clock(quiet)}", style="bold red")
        if view is None:
            yield Text(f"waiting for the replay server at {self._address}")
            return
        yield one_line(f"run {view.run} at {self._address}   {self.line(view)}")
        for problem in problems(view):
            yield Text(one_line(problem).plain, style="bold red")
        yield numbers(view)
        yield who(view)
        yield from map(one_line, self._said)


def problems(view: View) -> Iterator[str]:
    """Iterate over problems: who waits for whom."""
    if view.paused:
        yield f"nothing new is admitted: {view.paused}"
    if view.waits:
        yield f"the learner waits: {view.waits}"
    yield from (silence_of(peer) for peer in view.peers if peer.silent_s >= NAMED_S)
    if not (view.finished or view.more_peers):
        there = {peer.role for peer in view.peers}
        yield from (said for role, said in ABSENT.items() if role not in there)


def silence_of(peer: PeerSeen) -> str:
    said = f"{peer.role} {peer.name} has been silent for {clock(peer.silent_s)}: stopped, stuck or cut off"
    return f"{said}; {FOLLOWS[peer.role]}" if peer.role in FOLLOWS else said


def numbers(view: View) -> Table:
    now = {name: value for name, value in view.now.items() if value}
    dropped = {name.removeprefix("replay/dropped_"): count for name, count in now.items() if "/dropped_" in name}
    states = [f"{now.get(f'replay/{name}', 0):.0f} {said}" for name, said in (
        ("in_flight", "groups in flight"), ("inserted", "wait"), ("leased", "planned"))]  # fmt: skip
    fates = [f"{now.get(f'replay/{name}', 0):.0f} {name}" for name in ("admitted", "trained")]
    idle = [
        f"{side} {share:.0%}" for side in ("rollout", "replay") if (share := view.last.get(f"idle/{side}")) is not None
    ]
    rows = (
        ("queue", states),
        ("  by age", by_age(now, "replay/inserted_age", "{:.0f}")),
        ("groups", fates),
        ("  dropped", [f"{reason} {count:.0f}" for reason, count in dropped.items()]),
        ("idle", idle),
        ("goodput", [f"{share:.1%}"] if (share := view.last.get("goodput/share")) is not None else []),
    )
    return facts((label, one_line(", ".join(cells))) for label, cells in rows)


def who(view: View) -> Table:
    table = Table("who", "heard", "serves", "makes", "tokens/s", "last token", box=None, padding=(0, 2, 0, 0))
    for peer in view.peers:
        name = one_line(f"{peer.role} {peer.name}")
        cells = [f"{clock(peer.silent_s)} ago"]
        if peer.role == "worker":
            served = (
                "--" if peer.served == NO_VERSION else f"{peer.served} ({view.policy_version - peer.served} behind)"
            )
            cells += [served, f"{peer.held} groups", f"{peer.tokens_per_s:,.0f}", f"{clock(peer.still_s)} ago"]
        table.add_row(name, *cells)
    if view.more_peers:
        table.add_row(f"{view.more_peers} others, heard more recently")
    return table
