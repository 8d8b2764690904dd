"""Encode the whole durable state, except payloads, as plain values, and back: the first record of a journal segment."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import Any

from asyncrl.drawing.curriculum import Draws
from asyncrl.errors import JournalError, WireError
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.core.durable.buffer import Buffer, Step
from asyncrl.replay.core.durable.ledger import Entry, GroupState, Ledger
from asyncrl.replay.core.durable.peers import Peers
from asyncrl.replay.core.durable.siblings import headers_of
from asyncrl.replay.core.durable.versions import VersionTree
from asyncrl.types import NO_VERSION, DropReason, StepPlan

_APART = ("state", "header", "payload", "first", "siblings")
_ENTRY = tuple(item.name for item in fields(Entry) if item.name not in _APART)


@dataclass(kw_only=True, eq=False)
class Parts:
    """All that is durable of a run."""

    tree: VersionTree = field(default_factory=VersionTree)
    ledger: Ledger = field(default_factory=Ledger)
    buffer: Buffer = field(default_factory=Buffer)
    pending: dict[int, Entry] = field(default_factory=dict)
    """Groups in flight that no worker holds, in the order in which they were returned."""
    held: dict[int, Entry] = field(default_factory=dict)
    """Groups in flight that a worker holds."""
    readmitted: deque[int] = field(default_factory=deque)
    """Prompt indices to be used again before the cursor advances."""
    draws: Draws | None = None
    """If prompts are drawn by measured pass rate: the measurements, and the position in each source."""
    peers: Peers = field(default_factory=Peers)
    cursor: int = 0
    """Number of new groups taken from the stream of prompts so far."""
    next_group_id: int = 0
    trained_steps: int = 0
    """Steps trained in the surviving history; also the number of the next one."""
    committed_step: int = -1
    version: int = NO_VERSION
    """The learner's policy version; NO_VERSION before the first publication and between a restore and its
    publication."""
    learner_settings: str = ""
    """Digest of the settings of the running learner."""
    again: bool = False
    """Whether the learner repeats part of the newest lineage; otherwise it began a new branch."""
    forking: bool = False
    """Whether a branch was begun and none of its weights are published yet."""
    finished: bool = False
    applied: int = 0
    """Number of events so far."""

    def values(self) -> dict[str, Any]:
        """Return all attributes by name."""
        return {item.name: getattr(self, item.name) for item in fields(Parts)}


_PLAIN = tuple(item.name for item in fields(Parts) if item.type in ("int", "str", "bool"))
"""Attributes that are stored as they are."""


def encode_image(parts: Parts) -> dict[str, Any]:
    """Return a msgpack-serializable image; `decode_image` restores the same parts from it, except payloads."""
    ledger, buffer = parts.ledger, parts.buffer
    return {
        **{name: getattr(parts, name) for name in _PLAIN},
        "tree": parts.tree.snapshot(),
        "readmitted": list(parts.readmitted),
        "admitted": ledger.admitted,
        "committed": ledger.committed,
        "counts": {key.value: count for key, count in ledger.counts.items()},
        "dropped": {key.value: count for key, count in ledger.dropped.items()},
        "entries": [_entry_row(entry) for entry in ledger.entries.values()],
        "siblings": [[e.group_id, e.first, e.siblings] for e in ledger.entries.values() if e.siblings],
        "pending": list(parts.pending),
        "held": list(parts.held),
        "waiting": list(buffer.waiting),
        "leased": list(buffer.leased),
        "done": list(buffer.done),
        "untrained": [_step_row(step) for step in buffer.untrained.values()],
        "trained": [_step_row(step) for step in buffer.trained.values()],
        "bytes": buffer.nbytes,
        "peers": parts.peers.image(),
        "draws": None if parts.draws is None else parts.draws.image(),
    }


def decode_image(image: dict[str, Any]) -> Parts:
    """Restore the parts from `image`.

    Raises:
        JournalError: `image` is not an image made by `encode_image`.
    """
    try:
        return _decode(image)
    except (KeyError, TypeError, ValueError, AttributeError, WireError) as error:
        raise JournalError(f"a snapshot in the journal cannot be read ({error!r}): another version wrote it") from error


def _entry_row(entry: Entry) -> list[Any]:
    header = None if entry.header is None else headers.encode_group_header(entry.header)
    return [entry.state.value, header, [getattr(entry, name) for name in _ENTRY]]


def _step_row(step: Step) -> list[Any]:
    plan = step.plan
    row = [plan.policy_version, wire.flatten_runs(tuple(plan.staleness.items())), plan.max_staleness]
    return [step.step, [entry.group_id for entry in step.members], row, step.evicted]


def _decode(image: dict[str, Any]) -> Parts:
    ledger = Ledger()
    ledger.entries = {entry.group_id: entry for entry in map(_entry, image["entries"])}
    for group, first, siblings in image["siblings"]:
        ledger.entries[group].first, ledger.entries[group].siblings = first, siblings
    ledger.sizes = Counter(entry.siblings for entry in ledger.entries.values())
    ledger.admitted, ledger.committed = image["admitted"], image["committed"]
    ledger.counts.update({GroupState(name): count for name, count in image["counts"].items()})
    ledger.dropped.update({DropReason(name): count for name, count in image["dropped"].items()})
    buffer = Buffer()
    for name in ("waiting", "leased", "done"):
        setattr(buffer, name, {group: ledger.entries[group] for group in image[name]})
    for row in image["untrained"]:
        buffer.untrained[row[0]] = _step(row, ledger)
    for row in image["trained"]:
        buffer.trained[row[0]] = _step(row, ledger)
    buffer.nbytes = image["bytes"]
    return Parts(
        **{name: image[name] for name in _PLAIN},
        tree=VersionTree.restore(image["tree"]),
        readmitted=deque(image["readmitted"]),
        ledger=ledger,
        buffer=buffer,
        pending={group: ledger.entries[group] for group in image["pending"]},
        held={group: ledger.entries[group] for group in image["held"]},
        peers=Peers.load(image["peers"]),
        draws=Draws.load(image["draws"]) if image["draws"] else None,
    )


def _entry(row: list[Any]) -> Entry:
    name, header, values = row
    entry = Entry(**dict(zip(_ENTRY, values, strict=True)))
    entry.state = GroupState(name)
    entry.header = None if header is None else headers.decode_group_header(header)
    return entry


def _step(row: list[Any], ledger: Ledger) -> Step:
    number, groups, (version, ages, bound), evicted = row
    members = [ledger.entries[group] for group in groups]
    plan = StepPlan(
        step=number,
        policy_version=version,
        groups=headers_of(members),
        staleness=dict(zip(ages[::2], ages[1::2], strict=True)),
        max_staleness=bound,
        shards=(),
    )
    return Step(step=number, members=members, plan=plan, evicted=evicted)
