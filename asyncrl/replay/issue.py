"""Small pure helpers of the core: seeds, fair shares, and whom a starving learner waits for."""

from __future__ import annotations

import hashlib

from asyncrl.replay.admission import AdmissionSettings
from asyncrl.replay.state import ReplayState
from asyncrl.replay.workers import Worker, Workers
from asyncrl.types import NO_VERSION


def assignment_seed(seed: int, group_id: int, attempt: int) -> int:
    """62 bits that depend on the run's seed, the group and the attempt only: the same after any restart."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def fair_share(settings: AdmissionSettings, member: Worker, capacity: int, unasked: int) -> int:
    """Groups `member` may hold so that the ready workers start evenly: by capacity, at least one.

    Without it the first worker to ask takes the whole window and the others idle.

    Args:
        capacity: of all ready workers, each at most the window: who claims room for a million groups would else leave
            nothing to the others.
        unasked: ready workers that have not asked yet; each counts like this one.
    """
    window = window_of(settings)
    own = min(window, max(1, member.capacity or 1))
    total = capacity + unasked * own
    return max(1, -(-window * own // max(total, own)))


def window_of(settings: AdmissionSettings) -> int:
    """Most groups that may be under way."""
    return min(settings.max_in_flight, (1 + settings.pipeline_depth) * settings.groups_per_step)


def why_no_batch(state: ReplayState, settings: AdmissionSettings, workers: Workers, step: int) -> tuple[str, str]:
    """`(reason, sentence)`: why `step` cannot be sealed. The reason is a short word for `idle/learner_s_<reason>`."""
    inserted = len(state.buffer.waiting)
    have = f"step {step} needs {settings.groups_per_step} groups, {inserted} are inserted, {state.in_flight} in flight"
    dropped = state.ledger.dropped_by_name()
    if dropped:
        have += "; dropped so far: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    if state.version == NO_VERSION:
        return "publication", f"{have}; the learner has not published any weights"
    if not workers.live:
        return "no_workers", f"{have}; no rollout worker is connected"
    ready = [
        worker
        for worker in workers.live.values()
        if worker.served in state.tree and state.tree.distance(worker.served, state.version) <= settings.max_lag
    ]
    who = ", ".join(
        f"{worker.name} (serves {worker.served}, holds {len(worker.held)})" for worker in workers.live.values()
    )
    if not ready and not state.held:
        return "weights", f"{have}; no worker serves a version near {state.version}: {who}"
    if inserted >= settings.groups_per_step:
        return "stale_wait", f"{have}; stale_policy=wait holds the step for groups in flight: {who}"
    return "generation", f"{have}; waiting for {who}"
