"""The publisher of all transports: gathers into one of two snapshots on a thread, sends on another.

    learner ranks --publish(v)--> thread: gather --> free snapshot --> pending --> thread: sender.send() --> current
                                             filling tells how far it is -----------------^
                                                                          sender.idle() keeps newcomers up to date

Consumes what the learner publishes; waits only for the sender, and only when two versions are already being sent;
unblocked by the sender taking the pending one. The learner may continue at once, and writes to the weights only as
`copied` releases them. Without snapshots (`reading`) the sender reads the weights themselves, and the learner writes
once it has finished.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from asyncrl.errors import WeightsError
from asyncrl.spans import span
from asyncrl.weights.base import PublishStats
from asyncrl.weights.canary import Canary
from asyncrl.weights.fingerprint import bucket_fingerprint
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.publishing.copying import BackgroundCopy, CopyStream
from asyncrl.weights.publishing.filling import Filling
from asyncrl.weights.publishing.gather import Route, choose_route, gather_into, plan
from asyncrl.weights.publishing.reading import Reading
from asyncrl.weights.publishing.sharding import local, memory_of
from asyncrl.weights.streams import SideStream

_GATHER_S = 60.0
"""Seconds that the ranks of a gather get, beyond the time that the first of them may wait for the sender."""


_PARTS, _LEAST_PART = 64, 4 << 20
"""Largest number of parts of a copy, and smallest size of a part in bytes; the optimizer waits for each part
separately."""


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """One version in the wire dtype; once filled, nobody writes to it while it is current or pending."""

    policy_version: int
    manifest: Manifest
    buffers: Sequence[torch.Tensor]
    canary: Canary | None = None
    filling: Filling
    fingerprints: list[str] = field(default_factory=list)
    """Per bucket. Computed during the copy; for buckets on a device, or without buffers, while they are sent; otherwise
    on demand."""
    reading: Reading | None = None
    """Set if the version is sent directly from the weights; `buffers` is then empty."""

    @property
    def on_device(self) -> bool:
        return any(buffer.device.type != "cpu" for buffer in self.buffers)

    def open(self) -> AbstractContextManager[None]:
        """Keep its bytes unchanged while they are sent. Raises WeightsGoneError: they have changed already."""
        return self.reading.open() if self.reading is not None else nullcontext()

    def fingerprint(self, bucket: int) -> str:
        """Fingerprint of one bucket; those of earlier buckets are computed too."""
        for buffer in self.buffers[len(self.fingerprints) : bucket + 1]:
            self.fingerprints.append(bucket_fingerprint(buffer))
        return self.fingerprints[bucket]

    def all_fingerprints(self) -> list[str]:
        """Fingerprints of all buckets, in order."""
        return [self.fingerprint(index) for index in range(len(self.manifest.buckets))]


class Sender(Protocol):
    """Learner's end of one transport. All methods run on the publisher's thread, `stats` on any."""

    @property
    def keeps_previous(self) -> bool:
        """Whether `send` wants the previous version, at the price of a third snapshot in memory."""
        ...

    @property
    def sends_buckets(self) -> bool:
        """Whether the next `send` is expected to need fingerprints of whole buckets; they are then computed while the
        bytes are copied. Called on any thread."""
        ...

    def send(self, snapshot: Snapshot, previous: Snapshot | None = None) -> None:
        """Send `snapshot` to all members that are present. Retries happen in here.

        The snapshot may still be being copied: `snapshot.filling` is waited for before any of its bytes or fingerprints
        is read. They are read while it is open (`snapshot.open`).
        """
        ...

    def idle(self, newest: Snapshot | None) -> None:
        """Look after newcomers. Called every few milliseconds while there is nothing to send."""
        ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class BackgroundPublisher:
    """Implements `weights.base.Publisher`. `sender` is None on ranks other than 0, which only take part in the gather.

    Args:
        wire_dtype: floating-point tensors are cast to it before they are gathered.
        bucket_bytes: limit on the size of a bucket.
        wait_s: longest that `publish` waits for the sender to take the previous version.
        device: device of the snapshots (gloo and files: cpu; nccl: the GPU).
        shared: allocate snapshots in memory that other processes of this machine can open.
        idle_s: seconds between two checks for newcomers.
        copied: False sends without snapshots; needs a sender that streams (`broadcast`), and nothing to gather.
    """

    def __init__(
        self,
        sender: Sender | None,
        *,
        wire_dtype: torch.dtype,
        bucket_bytes: int,
        wait_s: float,
        device: torch.device | str = "cpu",
        shared: bool = False,
        idle_s: float = 0.02,
        copied: bool = True,
    ) -> None:
        self._sender = sender
        self._copies = copied
        self._reading: Reading | None = None
        """Reading of the newest version, without snapshots."""
        self._stream = CopyStream()
        self._wire_dtype = wire_dtype
        self._bucket_bytes = bucket_bytes
        self._wait_s = wait_s
        self._device, self._shared = device, shared
        self._idle_s = idle_s
        self._copy = BackgroundCopy(wait_s + 2 * _GATHER_S)
        self._filling: Filling | None = None
        """Progress of the newest copy."""
        self._route = Route(background=False)
        self._copied: dict[str, torch.Tensor] = {}
        """What the newest copy reads."""
        self._stats = dict.fromkeys(("weights/gather_s", "weights/copy_wait_s"), 0.0)
        self._held_s = 0.0
        self._manifest: Manifest | None = None
        self._names: list[str] = []
        self._free: list[list[torch.Tensor]] = []
        self._pending: Snapshot | None = None
        self._current: Snapshot | None = None
        self._previous: Snapshot | None = None
        self._closing = False
        self._failure: Exception | None = None
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="weights-publisher", daemon=True)
        if sender is not None:
            self._thread.start()

    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]], canary: Canary | None = None
    ) -> PublishStats:
        self._stats["weights/copy_wait_s"], self._held_s = self._held_s, 0.0
        waited = self._wait(to_write=True)
        named = list(tensors)
        manifest = self._manifest_of(named)
        buffers = None
        if self._sender is not None:
            started = time.perf_counter()
            buffers = self._take_buffers(policy_version)
            waited += time.perf_counter() - started
        snapshot = Snapshot(
            policy_version=policy_version,
            manifest=manifest,
            buffers=buffers or [],
            canary=canary,
            filling=Filling(self._wait_s + _GATHER_S),
        )
        self._filling = snapshot.filling
        devices = [tensor.device for _, tensor in named] + [torch.device(self._device)]
        device = next((device for device in devices if device.type == "cuda"), None)
        if not self._copies:
            self._read(snapshot, named, device)
        elif self._route.background:
            self._copy.start(policy_version, partial(self._fill, snapshot, named, buffers), device)
        else:
            self._fill(snapshot, named, buffers)
        self._copied = dict(named)
        return PublishStats(wait_previous_s=waited, nbytes=snapshot.manifest.nbytes)

    def wait_copied(self) -> float:
        seconds = self._wait(to_write=False)
        self._held_s += seconds
        return seconds

    def copied(self) -> Iterator[Sequence[torch.Tensor]]:
        manifest, filling = self._manifest, self._filling
        parts = deque(_free_parts(manifest, self._copied) if manifest is not None and self._copy.running else ())
        while parts and self._copy.running and filling is not None:
            started = time.perf_counter()
            try:
                filling.wait(parts[0][0])
            except WeightsError:
                break  # `_wait` raises the reason
            self._held_s += time.perf_counter() - started
            if filling.reached < parts[0][0]:
                break  # it has ended, or it is on a device, which reports only its end
            free = list[torch.Tensor]()
            while parts and parts[0][0] <= filling.reached:
                free += parts.popleft()[1]
            yield free
        self._held_s += self._wait(to_write=True)

    def _wait(self, *, to_write: bool) -> float:
        return self._copy.wait() + (self._reading.wait(to_write=to_write) if self._reading is not None else 0.0)

    def stats(self) -> dict[str, float]:
        return self._stats | (self._sender.stats() if self._sender is not None else {})

    def close(self, *, failed: bool = False) -> None:
        self._copy.close(min(self._wait_s, _GATHER_S))
        if self._filling is not None:
            self._filling.end(failed=True)  # if it hangs: the sender would wait for it, and this call for the sender
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._sender is not None:
            self._thread.join(self._wait_s)

    def _read(self, snapshot: Snapshot, named: list[tuple[str, torch.Tensor]], device: torch.device | None) -> None:
        """Hand the weights themselves to the sender."""
        tensors = {name: local(tensor) for name, tensor in named}
        ordered = self._stream.after_now(device)
        self._reading = snapshot.reading = Reading(snapshot.policy_version, tensors, ordered, self._wait_s)
        snapshot.filling.end()
        self._hand_over(snapshot)

    def _hand_over(self, snapshot: Snapshot) -> None:
        with self._condition:
            if self._failure is not None and snapshot.reading is not None:
                snapshot.reading.give_up()  # the sender, which calls this when it ends, never got this version
            self._pending = snapshot
            self._condition.notify_all()

    def _fill(
        self, snapshot: Snapshot, named: list[tuple[str, torch.Tensor]], buffers: list[torch.Tensor] | None
    ) -> None:
        """Copy the tensors into the snapshot, followed by the sender."""
        started, filling = time.perf_counter(), snapshot.filling
        if buffers is not None:
            self._hand_over(snapshot)
        whole = False
        try:
            hashed = self._sender is not None and self._sender.sends_buckets
            snapshot.fingerprints += gather_into(snapshot.manifest, named, buffers, self._route.group, filling, hashed)
            if torch.device(self._device).type == "cuda":
                # The sender's thread has its own stream: without this it could send half-written buffers.
                torch.cuda.current_stream(self._device).synchronize()
            whole = True
        finally:
            filling.end(failed=not whole)
        self._stats["weights/gather_s"] = time.perf_counter() - started

    def _manifest_of(self, named: list[tuple[str, torch.Tensor]]) -> Manifest:
        names = [name for name, _ in named]
        if self._manifest is None:
            self._names = names
            self._manifest = plan(named, self._wire_dtype, self._bucket_bytes)
            self._route = choose_route(named, self._wait_s + _GATHER_S)
            if self._sender is not None:
                sets = range(3 if self._sender.keeps_previous else 2)
                self._free = [
                    self._manifest.allocate(self._device, shared=self._shared) if self._copies else [] for _ in sets
                ]
        elif names != self._names:
            raise WeightsError("publish was called with other parameter names than the first time; the set is fixed")
        return self._manifest

    def _take_buffers(self, policy_version: int) -> list[torch.Tensor]:
        """Return the buffers of a snapshot that nobody reads any more. Waits for the sender, bounded."""
        with self._condition:
            free = self._condition.wait_for(
                lambda: self._failure is not None or (self._pending is None and bool(self._free)), self._wait_s
            )
            if self._failure is not None:
                raise WeightsError(f"weights could not be sent: {self._failure}") from self._failure
            if not free:
                stuck = self._current.policy_version if self._current else "?"
                raise WeightsError(
                    f"version {policy_version} cannot be published: the sender is still busy with version {stuck} "
                    f"after {self._wait_s:.0f} s. A worker takes too long to load (see its log; weights.timeout_s may "
                    "be raised), or no group forms with the workers: then warnings above say why"
                )
            return self._free.pop()

    def _make_current(self, fresh: Snapshot, keep: bool) -> None:
        """Make `fresh` the current version; the buffers of the oldest one become free."""
        oldest, self._previous = (self._previous, self._current) if keep else (self._current, None)
        if oldest is not None:
            self._free.append(list(oldest.buffers))
        self._current = fresh

    def _main(self) -> None:
        assert self._sender is not None
        try:
            with SideStream(self._device).used():
                self._send_all(self._sender)
        except Exception as error:  # thread boundary: the learner's next publish raises it
            with self._condition:
                self._failure = error
                self._condition.notify_all()
        finally:
            if self._reading is not None:
                self._reading.give_up()
            self._sender.close()

    def _send_all(self, sender: Sender) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._pending is not None or self._closing, self._idle_s)
                if self._closing:
                    return
                fresh, self._pending = self._pending, None
                if fresh is not None:
                    self._make_current(fresh, sender.keeps_previous)
                    self._condition.notify_all()
            if fresh is None:
                sender.idle(self._current)
                continue
            with span("send the weights", version=fresh.policy_version):
                sender.send(fresh, self._previous)
            if fresh.reading is not None:
                fresh.reading.give_up()  # no receiver was present


def _free_parts(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield the numbers of final bytes after which tensors are read no more, and those tensors: at most 64 parts, of 4
    MiB or more."""
    ends, before = list[tuple[int, torch.Tensor]](), 0
    for bucket in manifest.buckets:
        ends += [(before + e.offset + e.nbytes, local(tensors[e.name])) for e in bucket.entries]
        before += bucket.nbytes
    last = {memory_of(tensor): end for end, tensor in ends}
    least, begun, part = max(before // _PARTS, _LEAST_PART), 0, list[torch.Tensor]()
    for end, tensor in ends:
        if last[memory_of(tensor)] == end:  # of two views of one memory, the later one counts
            part.append(tensor)
        if end - begun >= least:
            yield end, part
            begun, part = end, []
    yield before, part
