"""What rank 0 of a group puts on the wire for one version: buckets as they are copied, or deltas."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.delta import Encoded, encode
from asyncrl.weights.group import STRETCH, WeightGroup, passed
from asyncrl.weights.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas:
    """What changed since the version that all members have; nothing in a version that goes whole."""

    buckets: Sequence[Encoded] = ()
    copied_s: float = 0.0
    """From the first copied bytes until all were: what a version that goes whole is sent beside."""
    encode_s: float = 0.0


def encode_deltas(snapshot: Snapshot, previous: Snapshot) -> Deltas:
    """Raises WeightsError when the copy of `snapshot` fails."""
    snapshot.filling.wait(1)
    began = time.perf_counter()
    snapshot.filling.wait()
    copied = time.perf_counter()
    buckets = zip(snapshot.buffers, previous.buffers, snapshot.manifest.buckets, strict=True)
    encoded = [encode(new, old, bucket.element_bytes) for new, old, bucket in buckets]
    return Deltas(buckets=encoded, copied_s=copied - began, encode_s=time.perf_counter() - copied)


def send_whole(group: WeightGroup, snapshot: Snapshot) -> int:
    """Each piece as soon as it has been copied; returns the bytes sent."""
    for index in passed(group, _copied(group, snapshot)):
        if snapshot.on_device:
            snapshot.fingerprint(index)  # while the next one is on the wire
    snapshot.filling.wait()
    return snapshot.manifest.nbytes


def _copied(group: WeightGroup, snapshot: Snapshot) -> Iterator[tuple[int, torch.Tensor]]:
    """Bucket and piece, each when it is final.

    Raises:
        WeightsError: within one stretch the copy stood still for the time that the members wait for all of it.
    """
    done = 0
    for index, buffer in enumerate(snapshot.buffers):
        for stretch in buffer.split(STRETCH):
            stood_s = 0.0
            for piece in group.pieces(stretch):
                done += len(piece)
                began = time.monotonic()
                snapshot.filling.wait(done)
                stood_s += time.monotonic() - began
                if stood_s >= group.timeout_s:  # the group would blame a subscriber
                    raise WeightsError(
                        f"the copy out of the learner stood still for {stood_s:.1f} s, longer than weights.timeout_s: "
                        "a learner rank is slow in the gather. See its log, or raise weights.timeout_s"
                    )
                yield index, piece


def send_deltas(group: WeightGroup, deltas: Sequence[Encoded]) -> int:
    """Payload after payload; returns the bytes sent."""
    for _ in passed(group, ((None, piece) for delta in deltas for piece in group.pieces(delta.payload))):
        pass
    return sum(len(delta.payload) for delta in deltas)
