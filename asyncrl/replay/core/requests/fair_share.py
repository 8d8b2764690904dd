"""Small pure helpers of the core: seeds, fair shares, and what a learner without a batch waits for."""

from __future__ import annotations

import hashlib

from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.durable.siblings import whole_groups
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.core.live.workers import Worker, Workers
from asyncrl.types import NO_VERSION, StalePolicy

MOST_NAMED = 8
"""Limit on the workers named in one sentence."""


def assignment_seed(seed: int, group_id: int, attempt: int) -> int:
    """Return 62 bits that depend only on the run's seed, the group and the attempt: the same after any restart."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def fair_share(settings: AdmissionSettings, member: Worker, capacity: int, unasked: int) -> int:
    """Return how many assignments `member` may hold so that the ready workers start evenly: by capacity, at least one.

    Without this limit the first worker to ask takes the whole window and the others are idle.

    Args:
        capacity: sum over all ready workers, each counted as at most the window: otherwise a worker that claims room
            for a million groups would leave nothing for the others.
        unasked: number of ready workers that have not asked yet; each counts like this one.
    """
    window = window_of(settings)
    own = min(window, max(1, member.capacity or 1))
    total = capacity + unasked * own
    return max(1, -(-window * own // max(total, own)))


def window_of(settings: AdmissionSettings) -> int:
    """The most assignments that may be in progress."""
    groups = min(settings.max_in_flight, (1 + settings.pipeline_depth) * settings.groups_per_step)
    return groups * settings.orders_per_group


def is_recent(version: int, state: ReplayState, settings: AdmissionSettings) -> bool:
    """Return whether a worker that serves this version may get a new assignment."""
    known = state.version != NO_VERSION and version in state.tree
    return known and state.tree.distance(version, state.version) <= settings.max_lag


def what_is_missing(state: ReplayState, settings: AdmissionSettings, workers: Workers) -> str:
    """Return why a step cannot be sealed, as a word for `idle/learner_s_<reason>`. Cheap: called after every change."""
    if state.version == NO_VERSION:
        return "publication"
    if not workers.live:
        return "no_workers"
    if not state.held and not any(is_recent(worker.served, state, settings) for worker in workers.live.values()):
        return "weights"
    # Only these settings delay sealing while there are enough groups. Otherwise skip the count: to count whole groups
    # after each member takes as long as choosing a batch.
    may_hold = settings.window or settings.stale_policy is StalePolicy.WAIT
    enough = may_hold and len(state.buffer.waiting) >= settings.groups_per_step
    if enough and settings.by_sample:
        in_flight = [*state.held.values(), *state.pending.values()]
        enough = len(whole_groups(state.buffer.waiting.values(), in_flight)[0]) >= settings.groups_per_step
    return "stale_wait" if enough else "generation"


def why_no_batch(state: ReplayState, settings: AdmissionSettings, workers: Workers, step: int) -> str:
    """Return why a step cannot be sealed, in a sentence that names every worker."""
    inserted = len(state.buffer.waiting)
    have = (
        f"step {step} needs {settings.groups_per_step} groups; {inserted} are inserted, {state.in_flight} are in flight"
    )
    if settings.by_sample:
        have += f" (members, {settings.group_size} to a group)"
    dropped = state.ledger.dropped_by_name()
    if dropped:
        have += "; dropped so far: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    who = ", ".join(
        f"{worker.name} (serves {worker.served}, holds {len(worker.held)})" for worker in workers.live.values()
    )
    match what_is_missing(state, settings, workers):
        case "publication":
            return f"{have}; the learner has not published any weights"
        case "no_workers":
            return f"{have}; no rollout worker is connected"
        case "weights":
            none = all(worker.served == NO_VERSION for worker in workers.live.values())
            way_out = (
                ". None has received weights yet. See their logs, and check that they can reach weights.host"
                if none
                else ""
            )
            return f"{have}; no worker serves a version near {state.version}: {who}{way_out}"
        case "stale_wait":
            holder = f"window={settings.window}" if settings.window else "stale_policy=wait"
            return f"{have}; {holder} holds the step for groups in flight: {who}"
        case _:
            return f"{have}; waiting for {who}"


def who_is_silent(workers: Workers, now: float) -> str:
    """Name workers with the time since their last token or environment step, longest first; empty without workers."""
    silent = sorted(workers.live.values(), key=lambda worker: worker.moved)
    named = [f"{worker.name} for {now - worker.moved:.0f} s" for worker in silent[:MOST_NAMED]]
    if len(silent) > MOST_NAMED:
        named.append(f"{len(silent) - MOST_NAMED} others for {now - silent[MOST_NAMED].moved:.0f} s or less")
    return f"without a token or an environment step: {', '.join(named)}" if named else ""
