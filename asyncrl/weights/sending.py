"""What rank 0 of a group puts on the wire for one version: buckets as they are copied, or deltas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from asyncrl.weights.delta import Encoded
from asyncrl.weights.group import WeightGroup, passed
from asyncrl.weights.snapshot import Snapshot


def send_whole(group: WeightGroup, snapshot: Snapshot) -> int:
    """Each piece as soon as it has been copied; returns the bytes sent."""
    for index in passed(group, _copied(group, snapshot)):
        if snapshot.on_device:
            snapshot.fingerprint(index)  # while the next one is on the wire
    snapshot.filling.wait()
    return snapshot.manifest.nbytes


def _copied(group: WeightGroup, snapshot: Snapshot) -> Iterator[tuple[int, torch.Tensor]]:
    """Bucket and piece, each when it is final."""
    done = 0
    for index, buffer in enumerate(snapshot.buffers):
        for piece in group.pieces(buffer):
            done += len(piece)
            snapshot.filling.wait(done)
            yield index, piece


def send_deltas(group: WeightGroup, deltas: Sequence[Encoded]) -> int:
    """Payload after payload; returns the bytes sent."""
    for _ in passed(group, ((None, piece) for delta in deltas for piece in group.pieces(delta.payload))):
        pass
    return sum(len(delta.payload) for delta in deltas)
