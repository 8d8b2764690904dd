"""The replay settings, beside what they set. Importing them loads nothing else: a config is checked in a blink."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class JournalConfig:
    retain: str = "none"
    """`none` keeps what recovery needs, `window` also the newest `window_mb`, `all` the whole run: what `asyncrl audit`
    of all steps and `asyncrl rerun` need."""
    fsync_ms: float = 5.0
    """At most so long are events gathered to become durable together; every reply waits for its own."""
    segment_mb: int = 64
    """Size of one journal file, taken from the disk at once."""
    window_mb: int = 1024
    """With `retain=window`: how much stays after it is no longer needed."""


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    address: str = "tcp://127.0.0.1:5577"
    """Where the replay server binds and everyone connects. Loopback only, unless `keys` is set."""
    keys: str = ""
    """Directory made by `asyncrl keys`, one key pair per role: whoever connects proves its role, and all is encrypted.
    Empty: `<run.dir>/keys`, made by itself. Required off loopback, where each machine has a folder of its own."""
    local_sockets: bool = True
    """Processes of the server's user on its machine come by unix sockets in `<replay.keys>/local` (mode 0700), where
    nothing needs to be encrypted: a fifth (1 k tokens) to half (32 k) less processor time per group. All
    others, and all of them if this is false, come by tcp with their keys."""
    max_staleness: int = 4
    """Hard bound: no token older than this, in policy versions, ever contributes to a gradient."""
    pipeline_depth: int = 2
    """How many batches ahead of the learner admission lets rollouts run; at most `max_staleness`."""
    stale_policy: str = "mask"
    """`mask` over-age tokens, `drop` the whole group, or `wait` so that none gets over-age."""
    readmit_dropped: bool = False
    """Put the prompt of a group dropped as stale back in the stream."""
    admission: str = "group"
    """`group`: all members of a group are ordered of one worker and inserted at once. `sample`: each is ordered,
    inserted and stored by itself, so that one that takes long holds only its own place; a group is trained when all are
    there."""
    order: str = "fifo"
    """Which of the waiting groups are trained next: `fifo`, `freshest`, `prioritized` (largest spread of rewards),
    `uniform` (at random), or, with `max_times_sampled` above 1, `ess` (new ones, then those whose importance weights
    still have the largest effective sample size). It can choose only while more wait than a batch needs."""
    window: int = 0
    """Windowed FIFO: a group is trained only if it is among the `window` groups from the oldest open one on, as they
    were admitted. At most `window - 1` younger ones pass a straggler and none gets over-age; the learner may wait. 1:
    strictly in order; 0: no window. At most `(max_staleness - pipeline_depth) * learner.groups_per_step + 1`."""
    max_times_sampled: int = 1
    """In how many steps a group may be trained. Above 1 the rollouts make fewer groups; the bound holds at each use."""
    group_timeout_s: float = 3600.0
    """After so long an order is given to another worker, and what the first one makes of it is refused; 0 is never."""
    max_bytes: int = 1 << 30
    """Memory for stored groups; the byte credits of all producers together never exceed it."""
    heartbeat_s: float = 1.0
    """Time between two signs of life of a peer."""
    heartbeat_timeout_s: float = 10.0
    """Silence after which a worker is taken for dead and its assignments go to others."""
    wait_timeout_s: float = 300.0
    """Longest wait without progress (learner for a batch, worker for the server) before a typed error. Tokens and
    environment steps are progress: a first group may take longer."""
    shards: int = 0
    """So many processes store the payloads and hand them to the learner's ranks; the replay server then sees headers
    alone. 0: it stores them itself, which carries a thousand GPUs (docs/scale.md)."""
    shard_address: str = ""
    """Where a shard binds: each has its own, `asyncrl local` chooses them."""
    durability: str = "journal"
    """`journal`: what the server acknowledges survives its death and the machine's, in `<run.dir>/journal`. `memory`:
    a server that dies takes all groups since the last checkpoint with it, and the run ends."""
    max_restarts: int = 10
    """How often in an hour `asyncrl local` restarts a replay server, or a shard, that died; only with a journal."""
    journal: JournalConfig = field(default_factory=JournalConfig)
