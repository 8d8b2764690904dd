"""Run the real replay server on a disk that can lose power, with a failpoint and optionally one planted mistake."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.requests.rollouts import Rollouts
from asyncrl.replay.core.run import Run
from asyncrl.replay.server.outbox import Outbox, Replies
from asyncrl.replay.server.sessions import Session
from asyncrl.replay.serving import run_server

from .power import Failpoint, PowerDisk
from .settings import DIGEST, ChaosSettings


def ack_before_fsync() -> None:
    def promise(self: Outbox, session: Session, request: int, frames: Sequence[Frame]) -> None:
        self.send(session.identity, frames)

    Outbox.promise = promise


def early_manifest() -> None:
    """Mutant: a batch is sent before its plan is durable; other replies still wait."""
    answer = Replies.answer

    def early(self: Replies, session: Session, request: int, verb: str, reply: Any) -> None:
        if verb == "lease":
            self.outbox.send(session.identity, [self.envelope("ok", request, reply.body), *reply.frames])
        else:
            answer(self, session, request, verb, reply)

    Replies.answer = early  # pyright: ignore[reportAttributeAccessIssue]


def no_dedup() -> None:
    """Mutant: a group that is inserted again is admitted as a new group."""
    insert = Rollouts.insert

    def twice(self: Rollouts, worker: str, incarnation: str, header: Any, payload: Any) -> Any:
        reply = insert(self, worker, incarnation, header, payload)
        if reply.status == "duplicate":
            run, state = self._run, self._state
            member = run.workers.live[worker]
            number, prompt = state.next_group_id, state.next_prompt()
            run.record(ev.Issued(number, prompt, 0, worker, incarnation, state.version, member.served))
            run.record(ev.Inserted(replace(header, group_id=number, prompt_index=prompt, attempt=0), payload))
        return reply

    Rollouts.insert = twice


def no_fencing() -> None:
    """Mutant: the first insert of a group is accepted, whatever its attempt and sender."""
    insert, refuse = Rollouts.insert, Run.refuse_replaced

    def anybody(self: Rollouts, worker: str, incarnation: str, header: Any, payload: Any) -> Any:
        entry = self._state.held.get(header.group_id)
        if entry is not None and entry.worker in self._run.workers.live:
            header = replace(header, attempt=entry.attempt, worker=entry.worker)
            return insert(self, entry.worker, entry.incarnation, header, payload)
        return insert(self, worker, incarnation, header, payload)

    Rollouts.insert = anybody
    Run.refuse_replaced = lambda self, peer, incarnation: (
        refuse(self, peer, incarnation) if peer.startswith("learner") else None
    )


def group_split() -> None:
    """Mutant: some accepted groups lose their last trajectory."""
    record = Run.record

    def split(self: Run, event: ev.Event) -> None:
        if isinstance(event, ev.Inserted) and event.header.group_id % 7 == 3:
            event = replace(event, header=replace(event.header, trajectories=event.header.trajectories[:-1]))
        record(self, event)

    Run.record = split


MUTANTS = {
    "ack_before_fsync": ack_before_fsync,
    "early_manifest": early_manifest,
    "no_dedup": no_dedup,
    "no_fencing": no_fencing,
    "group_split": group_split,
}


def with_reply_failpoints(failpoint: Failpoint) -> None:
    send = Outbox.send

    def watched(self: Outbox, identity: bytes, frames: Sequence[Frame]) -> None:
        failpoint.pass_by("reply before")
        send(self, identity, frames)
        failpoint.pass_by("reply after")

    Outbox.send = watched


def main() -> None:
    settings = ChaosSettings.load(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    failpoint = Failpoint(settings.failpoint, settings.failpoint_count)
    with_reply_failpoints(failpoint)
    if settings.mutant in MUTANTS:
        MUTANTS[settings.mutant]()
    disk = PowerDisk(settings.journal, settings.sync_delay_s, failpoint, settings.full)
    config = replace(settings.replay(), address=settings.listen or settings.address)
    run_server(config, settings.admission(), "chaos", DIGEST, 7, disk=disk)


if __name__ == "__main__":
    main()
