"""Settings of the replay."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class JournalConfig:
    retain: str = "none"
    """What the journal keeps: `none`, only what recovery needs; `window`, also the newest `window_mb`; `all`, the whole
    run, as `asyncrl rerun` and `asyncrl audit` of all steps need."""
    fsync_ms: float = 5.0
    """Longest time in milliseconds for which events are gathered into one sync to disk; replies wait for it. Smaller
    answers sooner and syncs more often."""
    segment_mb: int = 64
    """Size of one journal file in MiB, reserved on disk at once."""
    window_mb: int = 1024
    """With `replay.journal.retain=window`: how many MiB are kept beyond what recovery needs."""


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    address: str = "tcp://127.0.0.1:5577"
    """Where the replay server listens and everyone connects. Other than loopback only with `replay.keys`."""
    keys: str = ""
    """Folder of keys made by `asyncrl keys`, one pair per role: every connection proves its role and is encrypted.
    Empty: made automatically in `<run.dir>/keys`, for one machine; required for any other address."""
    local_sockets: bool = True
    """Let the server's own user connect on the same machine over unix sockets, without encryption, which takes a fifth
    (1 k tokens) to half (32 k) less processor time per group. False: everyone uses tcp and keys."""
    max_staleness: int = 4
    """Hard bound in policy versions: an older token never contributes to a gradient. 0 is synchronous training; raise
    it for long generations."""
    pipeline_depth: int = 2
    """How many batches ahead of the learner rollouts may run; typical staleness is close to it. Raise it if the learner
    waits (`idle/learner`), lower it for fresher data."""
    stale_policy: str = "mask"
    """What happens to tokens over the bound: `mask` them, `drop` their whole group, or `wait`: the learner waits so
    that none gets that old."""
    admission: str = "group"
    """`group`: one worker generates all members of a group and sends them together. `sample`: members are generated and
    stored one by one, so that a long one holds only its own place; the group is trained when all are there
    (docs/staleness.md)."""
    order: str = "fifo"
    """Which waiting groups are trained next: `fifo`, or `freshest`, which lets groups that are passed over age until
    they are dropped. Matters only while more wait than a batch needs."""
    window: int = 0
    """Only this many groups, counted from the oldest unfinished one, may be trained, so that long ones are not left
    behind; the learner may wait. 1: strictly in order; 0: no window; at most `(max_staleness - pipeline_depth) *
    learner.groups_per_step + 1`."""
    max_times_sampled: int = 1
    """In how many steps a group may be trained. Above 1, rollouts make fewer groups and data gets older; the bound on
    its age holds at each use."""
    group_timeout_s: float = 3600.0
    """After so many seconds an unfinished group is given to another worker, and what the first one makes of it is
    refused. 0: never."""
    max_bytes: int = 1 << 30
    """Memory in bytes for stored groups. When it is full, workers wait."""
    heartbeat_s: float = 1.0
    """Seconds between two heartbeats of a peer."""
    heartbeat_timeout_s: float = 10.0
    """Seconds of silence after which a worker counts as dead and its groups go to others."""
    wait_timeout_s: float = 300.0
    """Longest wait in seconds without any progress (the learner for a batch, a worker for the server) before an error.
    Generated tokens and environment steps are progress, so a first group may take longer."""
    durability: str = "journal"
    """`journal`: what the server acknowledged survives its death, and the machine's, in `<run.dir>/journal`. `memory`:
    a server that dies loses all groups since the last checkpoint, and ends the run."""
    max_restarts: int = 10
    """How often per hour `asyncrl local` restarts a replay server that died; needs the journal."""
    journal: JournalConfig = field(default_factory=JournalConfig)
