"""What rank 0 of a group puts on the wire for one version: buckets as they are copied, or deltas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.broadcast.group import STRETCH, WeightGroup, passed
from asyncrl.weights.delta import Encoded, encode
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.manifest import Bucket
from asyncrl.weights.publishing.reading import Reading
from asyncrl.weights.publishing.snapshot import Snapshot


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


def send_whole(group: WeightGroup, snapshot: Snapshot, through: Callable[[], None] = lambda: None) -> int:
    """Each piece as soon as it has been copied; returns the bytes sent.

    Args:
        through: called whenever a piece is.

    Raises:
        RuntimeError: a member is gone or too slow; WeightsError where the copy had taken half of its time or all of it.
    """
    if snapshot.reading is not None:
        return _send_read(group, snapshot, snapshot.reading, through)
    copied = _Copied(group, snapshot)
    try:
        for index in passed(group, copied):
            through()
            if snapshot.on_device:
                snapshot.fingerprint(index)  # while the next one is on the wire
    except WeightsError:
        raise
    except RuntimeError as error:  # the group only knows that bytes did not come through, and blames a subscriber
        if copied.stood_s < group.timeout_s / 2:
            raise
        raise WeightsError(f"{copied.why()} What is said of subscribers came after that: {error}") from error
    snapshot.filling.wait()
    return snapshot.manifest.nbytes


def _send_read(group: WeightGroup, snapshot: Snapshot, reading: Reading, through: Callable[[], None]) -> int:
    """Without a snapshot: the next piece is cast and hashed while one is on the wire."""
    buckets = snapshot.manifest.buckets
    prints = [Fingerprint() for _ in buckets]

    def sizes(bucket: Bucket) -> Iterator[int]:
        return map(len, group.pieces(torch.empty(bucket.nbytes, dtype=torch.uint8, device="meta")))

    def flow() -> Iterator[tuple[None, torch.Tensor]]:
        number = 0
        for bucket, fingerprint in zip(buckets, prints, strict=True):
            for piece in reading.pieces(bucket, sizes(bucket), number):
                fingerprint.update(piece)
                number += 1
                yield None, piece

    reading.rooms.reserve(max((size for bucket in buckets for size in sizes(bucket)), default=0))
    for _ in passed(group, flow()):
        through()
    snapshot.fingerprints[:] = [fingerprint.hex() for fingerprint in prints]
    return snapshot.manifest.nbytes


class _Copied:
    """Bucket and piece, each when it is final.

    Raises:
        WeightsError: within one stretch the copy stood still for the time that the members wait for all of it.
    """

    def __init__(self, group: WeightGroup, snapshot: Snapshot) -> None:
        self._group, self._snapshot = group, snapshot
        self.stood_s = 0.0
        """Of the stretch that is on its way: how long there was nothing to send."""

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        done = 0
        for index, buffer in enumerate(self._snapshot.buffers):
            for stretch in buffer.split(STRETCH):
                self.stood_s = 0.0
                for piece in self._group.pieces(stretch):
                    done += len(piece)
                    began = time.monotonic()
                    self._snapshot.filling.wait(done)
                    self.stood_s += time.monotonic() - began
                    if self.stood_s >= self._group.timeout_s:
                        raise WeightsError(self.why())
                    yield index, piece

    def why(self) -> str:
        return (
            f"the copy out of the learner stood still for {self.stood_s:.1f} s of weights.timeout_s="
            f"{self._group.timeout_s:g}: a learner rank is slow in the gather. See its log, or raise weights.timeout_s."
        )


def send_deltas(group: WeightGroup, deltas: Sequence[Encoded]) -> int:
    """Payload after payload; returns the bytes sent."""
    for _ in passed(group, ((None, piece) for delta in deltas for piece in group.pieces(delta.payload))):
        pass
    return sum(len(delta.payload) for delta in deltas)
