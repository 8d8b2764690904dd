"""The whole durable state as plain values, payloads excepted, and back: the snapshot at the head of a segment."""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from asyncrl.errors import JournalError, WireError
from asyncrl.replay import wire
from asyncrl.replay.buffer import Buffer, Step
from asyncrl.replay.ledger import Entry, GroupState, Ledger
from asyncrl.replay.peers import Peers
from asyncrl.replay.versions import VersionTree, tree_edges
from asyncrl.types import DropReason, StepPlan

if TYPE_CHECKING:
    from asyncrl.replay.state import ReplayState

_PLAIN = ("cursor", "next_group_id", "trained_steps", "committed_step", "version", "finished", "applied")
"""Attributes of the state that are plain values."""
_ENTRY = tuple(item.name for item in fields(Entry) if item.name not in ("state", "header", "payload"))


def state_image(state: ReplayState) -> dict[str, Any]:
    """msgpack-able; `load_image` makes the same state of it, but for the payloads."""
    ledger, buffer = state.ledger, state.buffer
    return {
        **{name: getattr(state, name) for name in _PLAIN},
        "tree": state.tree.snapshot(),
        "readmitted": list(state.readmitted),
        "admitted": ledger.admitted,
        "committed": ledger.committed,
        "counts": {key.value: count for key, count in ledger.counts.items()},
        "dropped": {key.value: count for key, count in ledger.dropped.items()},
        "entries": [_entry_row(entry) for entry in ledger.entries.values()],
        "pending": list(state.pending),
        "held": list(state.held),
        "waiting": list(buffer.waiting),
        "leased": list(buffer.leased),
        "done": list(buffer.done),
        "untrained": [_step_row(step) for step in buffer.untrained.values()],
        "trained": [_step_row(step) for step in buffer.trained.values()],
        "bytes": buffer.nbytes,
        "peers": state.peers.image(),
    }


def _entry_row(entry: Entry) -> list[Any]:
    header = None if entry.header is None else wire.encode_group_header(entry.header)
    return [entry.state.value, header, [getattr(entry, name) for name in _ENTRY]]


def _step_row(step: Step) -> list[Any]:
    plan = step.plan
    row = None if plan is None else [plan.policy_version, wire.flatten_runs(tuple(plan.staleness.items()))]
    return [step.step, [entry.group_id for entry in step.members], row, step.evicted]


def load_image(state: ReplayState, image: dict[str, Any]) -> None:
    """Make `state` the one that `image` was taken of.

    Raises:
        JournalError: it is no such image.
    """
    try:
        _load(state, image)
        # Loading is no event of the run, and whoever applies it is about to count one.
        state.applied -= 1
    except (KeyError, TypeError, ValueError, AttributeError, WireError) as error:
        raise JournalError(f"a snapshot in the journal cannot be read ({error!r}): another version wrote it") from error


def _load(state: ReplayState, image: dict[str, Any]) -> None:
    for name in _PLAIN:
        setattr(state, name, image[name])
    state.tree = VersionTree.restore(tree_edges(image["tree"]))
    state.readmitted = deque(image["readmitted"])
    ledger = Ledger()
    ledger.entries = {entry.group_id: entry for entry in map(_entry, image["entries"])}
    ledger.admitted, ledger.committed = image["admitted"], image["committed"]
    ledger.counts.update({GroupState(name): count for name, count in image["counts"].items()})
    ledger.dropped.update({DropReason(name): count for name, count in image["dropped"].items()})
    buffer = Buffer()
    for name in ("waiting", "leased", "done"):
        setattr(buffer, name, {group: ledger.entries[group] for group in image[name]})
    for row in image["untrained"]:
        buffer.untrained[row[0]] = _step(row, ledger, state.max_staleness)
    for row in image["trained"]:
        buffer.trained[row[0]] = _step(row, ledger, state.max_staleness)
    buffer.nbytes = image["bytes"]
    state.ledger, state.buffer = ledger, buffer
    state.pending = {group: ledger.entries[group] for group in image["pending"]}
    state.held = {group: ledger.entries[group] for group in image["held"]}
    state.peers = Peers.load(image["peers"])


def _entry(row: list[Any]) -> Entry:
    name, header, values = row
    entry = Entry(**dict(zip(_ENTRY, values, strict=True)))
    entry.state = GroupState(name)
    entry.header = None if header is None else wire.decode_group_header(header)
    return entry


def _step(row: list[Any], ledger: Ledger, max_staleness: int) -> Step:
    number, groups, plan, evicted = row
    members = [ledger.entries[group] for group in groups]
    step = Step(step=number, members=members, evicted=evicted)
    if plan is not None:
        version, ages = plan
        step.plan = StepPlan(
            step=number,
            policy_version=version,
            groups=tuple(entry.header for entry in members if entry.header is not None),
            staleness=dict(zip(ages[::2], ages[1::2], strict=True)),
            max_staleness=max_staleness,
            shards=(),
        )
    return step
