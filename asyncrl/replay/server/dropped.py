"""Samples of dropped groups, and of members missing from groups, that the server keeps for display until the next
step."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.replay.codec.group import StoredGroup, decode_texts
from asyncrl.replay.codec.messages import shortened
from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.replay.core.run import Run
from asyncrl.replay.protocol import MEMBER, MOST_DROPPED, DroppedSample
from asyncrl.types import NO_VERSION, DropReason, GroupHeader


class Dropped:
    """The first `MOST_DROPPED` samples since the last step. Not journaled: lost when this process ends."""

    def __init__(self, run: Run) -> None:
        self._kept: list[DroppedSample] = []
        run.on_stale = self.stale

    def told(self, sample: DroppedSample) -> None:
        """Add a sample sent by the worker that gave up the group."""
        if len(self._kept) < MOST_DROPPED:
            self._kept.append(shortened(sample))

    def member(self, sample: DroppedSample | None, header: GroupHeader) -> None:
        """Add a sample of a member that is missing from an inserted group."""
        if sample is not None:
            known = replace(sample, group_id=header.group_id, worker=header.worker)
            self.told(replace(known, dropped=MEMBER + sample.dropped))

    def stale(self, entry: Entry, reason: DropReason) -> None:
        """Add a sample of a stale group, before its payload is released. Payloads that were evicted from memory are not
        fetched."""
        stored = isinstance(entry.payload, StoredGroup)
        if stored and entry.header is not None and len(self._kept) < MOST_DROPPED:
            self._kept.append(stale_sample(entry.header, entry.payload, reason))

    def taken(self) -> tuple[DroppedSample, ...]:
        kept, self._kept = self._kept, []
        return tuple(kept)


def stale_sample(header: GroupHeader, stored: StoredGroup, reason: DropReason) -> DroppedSample:
    """Return the sample of a stale group: its first member."""
    prompt, completions, _, _ = decode_texts(stored.texts)
    first = header.trajectories[0]
    versions = [version for version, _ in first.version_tokens] or [NO_VERSION]
    return shortened(
        DroppedSample(
            group_id=header.group_id,
            worker=header.worker,
            prompt=prompt,
            completion=completions[0] if completions else "",
            reward=first.reward,
            rewards=first.rewards,
            finish_reason=first.finish_reason,
            version_min=min(versions),
            version_max=max(versions),
            dropped=reason.value,
        )
    )
