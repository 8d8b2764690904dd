"""Keeps `rollout.workers` workers alive until the run is over. Any number of pools may serve a run, and join or leave
it: `asyncrl rollout` with the same settings adds one, SIGTERM removes it.

consumes:     ends of workers
waits for:    any worker to end, without a deadline: workers run as long as the run does, and end by themselves when
              the replay server stops them or stays away
unblocked by: a worker's end, a restart that is due, the loss of what workers run on, SIGTERM or SIGINT
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil

from asyncrl.collector import load
from asyncrl.errors import ConfigError
from asyncrl.replay.net.keyring import with_keys
from asyncrl.rollout.host import (
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_STOPPED,
    HostLostError,
    WorkerExit,
    WorkerHost,
    WorkerSpec,
)
from asyncrl.rollout.pool.log_tail import last_line, log_size
from asyncrl.rollout.pool.relay import Relay
from asyncrl.rollout.pool.specs import worker_specs
from asyncrl.schema import Config
from asyncrl.storage.held import clear_away
from asyncrl.storage.occupancy import lived_in
from asyncrl.telemetry.live.tails import marked
from asyncrl.utils.process_tree import ProcessTree, process_at, start_reaper
from asyncrl.utils.restart_policy import Restarts
from asyncrl.utils.stopped_processes import StoppedProcesses, watched_supervisors

HOST_MODULES = {"ray": "asyncrl.rollout.pool.ray_host", "process": "asyncrl.rollout.pool.process_host"}
"""Imported late: a run on plain processes must not load Ray (0.5 s, 60 MB)."""
TURN_S = 0.5
STEADY_S = 60.0
"""A worker that lived this many seconds is restarted at once; earlier deaths are followed by growing delays."""
MAX_DELAY_S = 10.0
REAP_S = 5.0
HASTE_S = 1.0
"""Seconds after a second signal at which whatever is left is killed."""
BEGUN = "ASYNCRL_POOL_BEGUN"
"""Environment variable: the times, in monotonic seconds, at which this pool restarted because its own Ray was lost."""


@dataclass(slots=True)
class _Slot:
    """A place in the pool, held by one worker after another."""

    spec: WorkerSpec
    restarts: Restarts
    started_at: float = 0.0
    log_size: int = 0
    """Size of its log when its worker was started."""


class RolloutPool:
    def __init__(self, specs: list[WorkerSpec], host: WorkerHost, *, max_restarts: int) -> None:
        self._host = host
        self._slots = {spec.name: _Slot(spec, Restarts(max_restarts)) for spec in specs}
        self._due: list[tuple[float, str]] = []
        """Heap of pending restarts: `(monotonic time, worker)`."""
        self._signal = 0
        self.family = ProcessTree(os.getpid())
        self.spared = set[psutil.Process]()
        """Processes that outlive this one for a while: its reaper."""
        self._stopped = StoppedProcesses()
        self._relay = Relay(_say)

    def run(self) -> int:
        """Return the exit code: 0 if all workers stopped normally, 1 if one failed for good, 128 + a signal's number.

        Raises:
            HostLostError: what the workers run on is lost; they have been stopped.
        """
        try:
            for name, slot in self._slots.items():
                self._start(name)
                _say(f"worker {name} is starting; its log: {slot.spec.log_path}")
            unfinished = set(self._slots)
            while unfinished and not self._signal:
                self._start_due()
                self.family.look()
                for said in self._stopped.look(self.family.members):
                    _say(said)
                self._relay.look()
                for ended in self._host.wait(TURN_S):
                    if ended.code == EXIT_STOPPED:
                        unfinished.discard(ended.name)
                    elif not self._may_restart(ended):
                        return 1
            if not self._signal:
                return 0
            name = signal.Signals(self._signal).name
            _say(f"{name}: the workers end. A second signal (Ctrl-C) kills them after {HASTE_S:g} s")
            return 128 + self._signal
        finally:
            self._host.close()

    def stop(self, number: int, _frame: FrameType | None = None) -> None:
        """Signal handler: `run` ends within one turn, or at a second signal after `HASTE_S`, whatever is waited for."""
        if self._signal:
            haste = threading.Timer(HASTE_S, self._end_at_once)
            haste.daemon = True
            haste.start()
        self._signal = self._signal or number

    def _end_at_once(self) -> None:
        """What this misses is killed by the reaper; actors on a cluster of the user end with their driver."""
        self.family.kill(self.spared)
        os._exit(128 + self._signal)

    def _start(self, name: str) -> None:
        slot = self._slots[name]
        slot.started_at, slot.log_size = time.monotonic(), log_size(slot.spec.log_path)
        self._relay.begin(name, slot.spec.log_path)
        self._host.start(slot.spec)

    def _start_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            self._start(heapq.heappop(self._due)[1])

    def _may_restart(self, ended: WorkerExit) -> bool:
        """Schedule the restart of a worker that died, or report why there is none."""
        slot = self._slots[ended.name]
        lived_s = time.monotonic() - slot.started_at
        unread = "its log could not be read" if ended.elsewhere else last_line(slot.spec.log_path, slot.log_size)
        last = ended.said or unread
        why = f"worker {ended.name} died after {lived_s:.0f} s ({ended.how}): {last}"
        if ended.log:
            why += "\nThe end of its log, there:" + "".join(f"\n    {line}" for line in ended.log)
        log = f"Its log: {slot.spec.log_path}"
        if ended.code == EXIT_REFUSED:
            _tell(f"{why}\nA restart cannot help. {log}")
            return False
        limit = slot.restarts.limit
        if not slot.restarts.take():
            _tell(f"{why}\nIt was restarted rollout.max_worker_restarts={limit} times in an hour. {log}")
            return False
        recent = slot.restarts.recent
        delay_s = restart_delay_s(recent - 1, lived_s)
        slot.spec = replace(slot.spec, restart=slot.spec.restart + 1)
        _tell(f"{why}\nRestart {recent} of at most {limit} in an hour, after {delay_s:.1f} s")
        heapq.heappush(self._due, (time.monotonic() + delay_s, ended.name))
        return True


def restart_delay_s(restarts: int, lived_s: float) -> float:
    """Delay before a restart. Without it a worker that cannot start would use up all its restarts in seconds."""
    return 0.0 if lived_s > STEADY_S else min(MAX_DELAY_S, 0.25 * 2**restarts)


@contextlib.contextmanager
def pool_number(log_dir: Path) -> Iterator[int]:
    """Yield 0 for the first pool with this run folder, and the next free number for each that joins later."""
    log_dir.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        with (log_dir / f"pool-{number}.lock").open("w") as file:
            try:
                # Held while the file is open, so it is released however this process ends.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield number
            return


def run_pool(config: Config) -> int:
    """Start the workers and supervise them to the end. Returns the exit code of `RolloutPool.run`. The command that
    started this has checked the rows (`asyncrl.cli.starting.preflight`); a worker refuses a row that it cannot use.

    Raises:
        ConfigError: `rollout.host` is unknown, or the keys of the run are not safe.
    """
    if config.rollout.host not in HOST_MODULES:
        raise ConfigError(f"rollout.host={config.rollout.host!r} is unknown. Choose from: {', '.join(HOST_MODULES)}")
    config = with_keys(config)
    with pool_number(Path(config.run.dir) / "logs") as number, lived_in(config.run.dir), watched_supervisors(_say):
        reaper = start_reaper()
        specs = worker_specs(config, number)
        hold_ray_to_loopback(config, os.environ)
        host = load(HOST_MODULES[config.rollout.host]).make_host(config)
        pool = RolloutPool(specs, host, max_restarts=config.rollout.max_worker_restarts)
        pool.spared |= {own for own in (process_at(reaper.pid),) if own}
        # After the host has started: Ray installs signal handlers, which these must override.
        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, pool.stop)
        try:
            return pool.run()
        except HostLostError as error:
            return _begin_again(error, config, pool.family)
        finally:
            reaper.kill()
            reaper.wait()
            clear_away()


def _begin_again(lost: HostLostError, config: Config, family: ProcessTree) -> int:
    """Restart this process with the same number and arguments, if that repairs the loss: Ray cannot be shut down safely
    once a part of it is gone. Returns the exit code if it does not."""
    limit = config.rollout.max_worker_restarts
    begun = Restarts(limit, [float(each) for each in os.environ.get(BEGUN, "").split()])
    _tell(f"{lost}")
    if not lost.mendable:
        return EXIT_FAILED
    if not begun.take():
        _tell(f"It was started again rollout.max_worker_restarts={limit} times in an hour. The pool ends")
        return EXIT_FAILED
    _tell(f"Start {begun.recent} of at most {limit} in an hour")
    family.kill()
    _reap_children(REAP_S)
    environment = {**os.environ, BEGUN: " ".join(map(str, begun.taken))}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _reap_children(limit_s: float) -> None:
    """Reap children before the exec: the new program does not know them, and they would remain zombies."""
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)


def hold_ray_to_loopback(config: Config, environment: MutableMapping[str, str]) -> None:
    """Called before Ray is imported. If Ray does not start a cluster, its processes listen on 127.0.0.1, else on every
    interface. The variable is named for two operating systems but is read on all."""
    if config.rollout.host == "ray" and not config.ray.address:
        environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def _tell(message: str) -> None:
    """Log a message that `asyncrl local` also shows to the user."""
    _say(marked(message))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
