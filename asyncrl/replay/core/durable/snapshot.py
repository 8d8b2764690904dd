"""The snapshot of the replay in a checkpoint, and how a state is rolled back to it. Groups that were open are generated
again from their prompts, so neither their payloads nor the plans of steps are kept."""

from __future__ import annotations

from collections import deque
from typing import Any

from asyncrl.drawing.curriculum import Draws
from asyncrl.errors import ReplayError
from asyncrl.replay.core.durable.buffer import Buffer
from asyncrl.replay.core.durable.image import Parts
from asyncrl.replay.core.durable.ledger import Entry, GroupState, Ledger
from asyncrl.replay.core.durable.versions import VersionTree
from asyncrl.types import DropReason

SNAPSHOT_SCHEMA = 4


def encode_snapshot(parts: Parts) -> dict[str, Any]:
    """Return a msgpack-serializable snapshot of the state after its last trained step."""
    ledger = parts.ledger
    entries = ledger.entries.values()
    open_groups = [
        [entry.group_id, entry.prompt_index, entry.attempt, entry.failures] for entry in entries if not entry.trained
    ]
    used = sum(1 for entry in entries if entry.trained and entry.state is not GroupState.TRAINED)
    return {
        "schema": SNAPSHOT_SCHEMA,
        "step": parts.trained_steps - 1,
        "cursor": parts.cursor,
        "readmitted": list(parts.readmitted),
        "draws": None if parts.draws is None else parts.draws.image(),
        "next_group_id": parts.next_group_id,
        "tree": parts.tree.snapshot(),
        "open": open_groups,
        "siblings": [[e.group_id, e.first, e.siblings] for e in entries if e.siblings and not e.trained],
        "trained": ledger.counts[GroupState.TRAINED] + used,
        "dropped": {reason.value: count for reason, count in ledger.dropped.items()},
    }


def rolled_back(now: Parts, snapshot: dict[str, Any]) -> Parts:
    """Return the state in `snapshot`, with its open groups waiting to be issued again. Version numbers and group ids
    that this server has seen since, according to `now`, stay used.

    Raises:
        ReplayError: `snapshot` is not such a snapshot.
    """
    try:
        return _rolled_back(now, snapshot)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReplayError(f"the checkpoint's replay snapshot cannot be read: {error!r}") from error


def _rolled_back(now: Parts, snapshot: dict[str, Any]) -> Parts:
    if snapshot["schema"] != SNAPSHOT_SCHEMA:
        raise ReplayError(f"the checkpoint's replay snapshot has schema {snapshot['schema']}, not {SNAPSHOT_SCHEMA}")
    tree = VersionTree.restore(snapshot["tree"])
    ledger, pending = _open_groups(now, snapshot)
    ledger.committed = ledger.counts[GroupState.TRAINED] = snapshot["trained"]
    ledger.dropped.update({DropReason(name): count for name, count in snapshot["dropped"].items()})
    ledger.admitted += ledger.committed + sum(ledger.dropped.values())
    step = snapshot["step"]
    back = {
        "cursor": snapshot["cursor"],
        "next_group_id": max(snapshot["next_group_id"], now.next_group_id),
        "trained_steps": step + 1,
        "committed_step": step,
        # A server that outlived the rolled-back learner has seen later versions; forgetting them would reuse numbers.
        "tree": tree if tree.newest >= now.tree.newest else now.tree,
        "readmitted": deque(snapshot["readmitted"]),
        "ledger": ledger,
        "buffer": Buffer(),
        "pending": pending,
        "held": {},
        "draws": _draws(now.draws, snapshot),
    }
    return Parts(**now.values() | back)


def _open_groups(now: Parts, snapshot: dict[str, Any]) -> tuple[Ledger, dict[int, Entry]]:
    """Return a ledger that has only the open groups, and these groups as `pending`."""
    ledger, pending = Ledger(), {}
    siblings = {group_id: row for group_id, *row in snapshot["siblings"]}
    for group_id, prompt_index, attempt, failures in snapshot["open"]:
        known = now.ledger.entries.get(group_id)
        attempt = max(attempt, known.attempt if known else 0)
        entry = Entry(group_id=group_id, prompt_index=prompt_index, attempt=attempt, failures=failures)
        entry.first, entry.siblings = siblings.get(group_id, (-1, 0))
        ledger.admit(entry)
        pending[group_id] = entry
    return ledger, pending


def _draws(now: Draws | None, snapshot: dict[str, Any]) -> Draws | None:
    drawn = snapshot["draws"]
    draws = Draws.load(drawn) if drawn else now and now.begun_at(snapshot["cursor"])
    if drawn and draws and now and draws.rows != now.rows:
        # The same prompt index would be another row, so pass rates would be recorded for the wrong rows.
        raise ReplayError(
            f"the checkpoint's run draws from {list(draws.rows)} rows (data.curriculum), but the workers have "
            f"{list(now.rows)}. data.path, data.mixture and data.where must select the rows that the run began with. "
            "Give the same settings, or start a new run with another run.name"
        )
    return draws
