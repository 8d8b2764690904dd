"""The durable state of a run and the one function that changes it: `apply(event)`.

    event  ──▶  ReplayState.apply  ──▶  version tree, ledger, buffer, prompts, pass rates; then the conservation law

No clock, no workers, no waiting: exactly the state that must survive a restart of the server is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.drawing.curriculum import Curriculum, Draws
from asyncrl.errors import LedgerError
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.image import Parts, decode_image, encode_image
from asyncrl.replay.core.durable.ledger import Entry, GroupState
from asyncrl.replay.core.durable.siblings import headers_of
from asyncrl.replay.core.durable.snapshot import encode_snapshot, rolled_back
from asyncrl.replay.core.durable.versions import VersionTree
from asyncrl.types import NO_VERSION, GroupHeader, StepPlan


def plan_of(sealed: ev.Sealed, groups: tuple[GroupHeader, ...], tree: VersionTree) -> StepPlan:
    """Return the plan, without shards, of a batch of these groups that was sealed so."""
    at, versions = sealed.policy_version, sorted({version for group in groups for version in group.versions})
    return StepPlan(
        step=sealed.step,
        policy_version=at,
        groups=groups,
        staleness={version: tree.distance(version, at, sealed.ahead) for version in versions},
        max_staleness=sealed.max_staleness,
        shards=(),
    )


class ReplayState(Parts):
    """See the module. Attributes are read-only for callers; only `apply` writes them."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Published: self._published,
            ev.Begun: self._begun,
            ev.Issued: self._issued,
            ev.Returned: self._returned,
            ev.Inserted: self._inserted,
            ev.Dropped: self._dropped,
            ev.Sealed: self._sealed,
            ev.Trained: self._trained,
            ev.Reused: self._reused,
            ev.Retired: self._retired,
            ev.Evicted: self._evicted,
            ev.Committed: self._committed,
            ev.Restored: self._restored,
            ev.Joined: lambda event: self.peers.join(event.worker, event.incarnation),
            ev.Announced: lambda event: self.peers.announce(event.values),
            ev.EvaluationAsked: lambda event: self.peers.ask(event),
            ev.EvaluationClosed: lambda event: self.peers.close(event.job_id),
            ev.Reloaded: lambda event: self._become(rolled_back(self, event.snapshot)),
            ev.Snapshotted: lambda event: self.load(event.image),
            ev.Surveyed: self._surveyed,
            ev.Configured: lambda event: None,
            ev.Finished: self._finished,
        }

    def apply(self, event: ev.Event) -> None:
        """Apply one event, then check the conservation law.

        Raises:
            LedgerError: the event violates the law or a life cycle.
            ReplayError: the event has an impossible version.
        """
        self._handlers[type(event)](event)
        self.applied += 1
        self.check()

    def check(self) -> None:
        buffer = self.buffer
        self.ledger.check(
            in_flight=len(self.pending) + len(self.held),
            inserted=len(buffer.waiting),
            leased=len(buffer.leased),
            trained=len(buffer.done),
        )

    @property
    def in_flight(self) -> int:
        return len(self.pending) + len(self.held)

    def untrained_in_window(self, pipeline_depth: int) -> int:
        """Open entries that will be trained in the next `1 + pipeline_depth` steps."""
        buffer, first = self.buffer, self.trained_steps
        return self.in_flight + len(buffer.waiting) + sum(map(len, buffer.within(first, first + pipeline_depth)))

    def groups_in_window(self, pipeline_depth: int) -> int:
        """The number of groups that the entries of `untrained_in_window` belong to."""
        planned = self.buffer.within(self.trained_steps, self.trained_steps + pipeline_depth)
        places = (self.pending.values(), self.held.values(), self.buffer.waiting.values(), *planned)
        return len({entry.whose for place in places for entry in place})

    def replays(self, pipeline_depth: int) -> bool:
        """Whether the learner has more steps to train again than rollouts run ahead of it: a group generated now would
        be over-age when its turn comes."""
        window = range(self.trained_steps, self.trained_steps + pipeline_depth + 1)
        return len(self.buffer.untrained) > 2 and all(step in self.buffer.untrained for step in window)

    def next_prompt(self, wanted: Curriculum | None = None) -> int:
        """Return the prompt index of the next new group. `wanted` is used only if rows were surveyed."""
        if self.readmitted:
            return self.readmitted[0]
        return self.cursor if self.draws is None else self.draws.next(self.cursor, wanted)

    def _surveyed(self, event: ev.Surveyed) -> None:
        order = event.order
        self.draws = Draws(
            event.rows, order["weights"], seed=order["seed"], shuffle=order["shuffle"], drawn=self.cursor
        )

    def _measured(self, prompt_index: int, pass_rate: float) -> None:
        if self.draws is not None and pass_rate >= 0:
            self.draws.measure(prompt_index, pass_rate)

    def _published(self, event: ev.Published) -> None:
        self.tree.publish(event.policy_version, event.parent, length=0, again=self.again)
        self.version, self.forking = event.policy_version, False

    def _begun(self, event: ev.Begun) -> None:
        self.pending |= self.ledger.begin(event.first, event.members, event.prompt_index)
        self.next_group_id = event.first + event.members
        self._take_prompt(event.prompt_index)

    def _take_prompt(self, prompt_index: int) -> None:
        if self.readmitted:
            self.readmitted.popleft()
            return
        self.cursor += 1
        if self.draws is not None:
            self.draws.take(prompt_index)

    def _issued(self, event: ev.Issued) -> None:
        entry = self.pending.pop(event.group_id, None)
        if entry is None:
            entry = Entry(group_id=event.group_id, prompt_index=event.prompt_index)
            self.ledger.admit(entry)
            self.next_group_id = event.group_id + 1
            self._take_prompt(event.prompt_index)
        entry.attempt = event.attempt
        entry.worker, entry.incarnation = event.worker, event.incarnation
        entry.served_version, entry.issued_version = event.served_version, event.policy_version
        entry.request = event.request
        self.held[entry.group_id] = entry

    def _returned(self, event: ev.Returned) -> None:
        entry = self.ledger.entry(event.group_id)
        if self.held.pop(entry.group_id, None) is None:
            raise LedgerError(f"group {event.group_id} was returned, but no worker held it")
        entry.worker = entry.incarnation = ""
        entry.failures += event.counted
        self.pending[entry.group_id] = entry

    def _inserted(self, event: ev.Inserted) -> None:
        entry = self.ledger.entry(event.header.group_id)
        if self.held.pop(entry.group_id, None) is None:
            raise LedgerError(f"group {entry.group_id} was inserted, but no worker held it")
        self.ledger.move(entry, GroupState.INSERTED)
        entry.header, entry.payload = event.header, event.payload
        self.buffer.put(entry)
        self._measured(entry.prompt_index, event.pass_rate)

    def _dropped(self, event: ev.Dropped) -> None:
        entry = self.ledger.entry(event.group_id)
        if entry.state is GroupState.IN_FLIGHT:
            self.pending.pop(entry.group_id, None)
            self.held.pop(entry.group_id, None)
            self.buffer.stand_last(entry.first, entry.siblings)
        else:
            self.buffer.forget(entry)
        self.ledger.drop(entry, event.reason)
        self._measured(entry.prompt_index, event.pass_rate)
        if event.readmit:
            self.readmitted.append(entry.prompt_index)

    def _sealed(self, event: ev.Sealed) -> None:
        members = [self.ledger.entry(group_id) for group_id in event.members]
        for entry in members:
            if entry.state is not GroupState.INSERTED:
                raise LedgerError(f"group {entry.group_id} is in steps {entry.planned} and in step {event.step}")
            self.ledger.move(entry, GroupState.LEASED)
        self.buffer.seal(event.step, members, plan_of(event, headers_of(members), self.tree))

    def _trained(self, event: ev.Trained) -> None:
        if event.step != self.trained_steps:
            raise LedgerError(f"step {event.step} was trained, but {self.trained_steps} is next")
        self.tree.publish(event.policy_version, self.version)
        self.version = event.policy_version
        for entry in self.buffer.train(event.step).members:
            if not entry.planned:
                self.ledger.move(entry, GroupState.TRAINED)
        self.trained_steps += 1

    def _reused(self, event: ev.Reused) -> None:
        for group_id in event.groups:
            entry = self.ledger.entry(group_id)
            self.ledger.move(entry, GroupState.INSERTED)
            self.buffer.reuse(entry)

    def _retired(self, event: ev.Retired) -> None:
        entry = self.ledger.entry(event.group_id)
        if not entry.trained:
            raise LedgerError(f"group {entry.group_id} was never trained; it can be dropped, not retired")
        over = self.buffer.retire(entry)
        self.ledger.move(entry, GroupState.TRAINED)
        if over:
            self.ledger.commit(entry)

    def _evicted(self, event: ev.Evicted) -> None:
        self.buffer.evict(event.step)

    def _committed(self, event: ev.Committed) -> None:
        for step in sorted(step for step in self.buffer.trained if step <= event.step):
            for entry in self.buffer.commit(step):
                self.ledger.commit(entry)
        self.committed_step = max(self.committed_step, event.step)

    def _restored(self, event: ev.Restored) -> None:
        for entry in self.buffer.restore(event.step, again=event.again):
            self._put_back(entry)
        self.trained_steps, self.learner_settings = event.step + 1, event.settings
        self.again, self.forking = event.again, not event.again
        self.version = event.policy_version if event.policy_version in self.tree else NO_VERSION
        self.finished = False
        number, version = event.step, event.policy_version
        self.peers.restore(event.incarnation, number, version, self.tree.newest + 1, event.run)

    def _put_back(self, entry: Entry) -> None:
        """Update the ledger to the place where the buffer put a group whose training was undone."""
        buffer, group_id = self.buffer, entry.group_id
        places = {
            GroupState.LEASED: buffer.leased,
            GroupState.TRAINED: buffer.done,
            GroupState.INSERTED: buffer.waiting,
        }
        state = next((state for state, place in places.items() if group_id in place), None)
        if state is None and not entry.trained:
            state = GroupState.IN_FLIGHT
            entry.worker = entry.incarnation = ""
            entry.header = None
            self.pending[group_id] = entry
        over = state is None
        state = state or GroupState.TRAINED
        if entry.state is not state:
            self.ledger.move(entry, state)
        if over:
            self.ledger.commit(entry)

    def _finished(self, event: ev.Finished) -> None:
        self.buffer.untrained.clear()
        self.finished = True

    def image(self) -> dict[str, Any]:
        """Return a msgpack-serializable image; `load` restores the same state from it, except payloads."""
        return encode_image(self)

    def load(self, image: dict[str, Any]) -> None:
        """Replace this state with the one in `image`.

        Raises:
            JournalError: `image` is not such an image.
        """
        self._become(decode_image(image))
        # Loading is not an event of the run, but `apply` is about to count it as one.
        self.applied -= 1

    def snapshot(self) -> dict[str, Any]:
        """See `asyncrl.replay.core.durable.snapshot`."""
        return encode_snapshot(self)

    def _become(self, parts: Parts) -> None:
        for name, value in parts.values().items():
            setattr(self, name, value)
