"""Staging of broadcast weights: the interface between the handshake of an epoch and the engine that loads them.

    join(seat) -> receive(event) -> fingerprints -> `load(staged())` by the engine -> receive ... -> leave()

`Staging` receives in the process of the subscriber. An engine whose model runs in other processes provides a
`Receiver` that runs one `Staging` in each of them, so that no byte takes a detour.

*Staging* is the memory that receives, in one process. Its contents, once complete and verified, are *staged*:
`StagedTensors` if the engine is in this process; a reference to them if it runs in others (vLLM's `StagedInWorkers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.base import StagedTensors
from asyncrl.weights.boxes import Box, contains, sizes, slices, whole, within
from asyncrl.weights.broadcast.group import WeightGroup, connect_store
from asyncrl.weights.broadcast.receive import BucketReceiver
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.manifest import Manifest, build_manifest
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.sliced import Wanted, sliced
from asyncrl.weights.streams import SideStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A member's place in one epoch of the group. Plain values, since it is sent to an engine's own processes."""

    host: str
    port: int
    backend: str
    epoch: int
    rank: int
    """First of the member's ranks, if it has several."""
    world: int
    timeout_s: float
    manifest: list[Any]
    """From `Manifest.to_wire`."""
    interface: str = ""
    """`weights.interface` of the member."""
    plan: list[Any] = field(default_factory=list)
    """From `SendPlan.to_wire`."""


class Receiver(Protocol):
    @property
    def width(self) -> int:
        """Number of ranks it occupies in the group: processes that receive. While it is 0, it is asked again."""
        ...

    def wanted(self) -> Sequence[Wanted]:
        """What each of its ranks stages; empty if all stage whole tensors. Called before each seat."""
        ...

    def join(self, seat: Seat) -> None:
        """Take the seat, leaving the previous one. Raises RuntimeError if the group does not form in time."""
        ...

    def receive(self, event: Mapping[str, Any]) -> list[str]:
        """Receive all buckets of the version that `event` announced into staging; nothing is loaded.

        Returns:
            Their fingerprints, recomputed from the received bytes. A bucket on which its processes differ has one that
            cannot match; one that is for none of them is "".

        Raises:
            RuntimeError: a member of the group died or fell silent. The staged contents are then invalid.
        """
        ...

    def staged(self) -> Any:
        """Argument for `load` after a `receive` whose fingerprints matched."""
        ...

    def changed(self) -> bool:
        """Whether its processes have been replaced since they took the seat: it then joins again, and the version
        served before must be loaded again."""
        ...

    def leave(self) -> None:
        """Leave the group at once; staging is kept. Never raises."""
        ...


class Staging:
    """Implements `Receiver` in this process, with all buckets in host memory.

    nccl and ipc receive on `device`, one piece at a time, and the fingerprints are computed there: a whole model would
    not fit on a GPU beside an engine that fills it. Sockets receive in host memory.

    The memory of a bucket is allocated, and pinned for a GPU, when its first bytes arrive: pinning a large model takes
    a minute, for which a group that forms would wait.
    """

    width = 1

    def __init__(self, device: torch.device | None = None) -> None:
        self._device, self._stream = device, SideStream(device)
        self._avoided: dict[str, float] = {}
        self.keeps: Wanted | None = None
        """Parts of the tensors that this process's engine reads, if known: it then gets no more than those."""
        self._groups: dict[int, WeightGroup] = {}
        """By lane."""
        self._receiver: BucketReceiver | None = None
        self._plan: SendPlan | None = None
        self._kept: Wanted | None = None
        """Parts that are staged; None for whole tensors."""
        self._layout = Manifest(buckets=())
        """Of the staged buckets."""
        self._memory = _Memory(self._layout, pinned=False)
        self._spare: _Memory | None = None
        """Memory that an engine, which keeps staged tensors, has returned in exchange."""
        self._outlines: Mapping[str, torch.Tensor] = {}
        """With parts: the whole tensors, without data."""
        self._targets: dict[str, torch.Tensor] = {}
        """Places in staging of the plan's entries, as far as they were asked for."""
        self._offered = StagedTensors()

    @property
    def nbytes(self) -> int:
        """Bytes of staging, with what pieces from a GPU pass through."""
        return self._memory.nbytes + (self._receiver.bounce_bytes if self._receiver is not None else 0)

    def wanted(self) -> Sequence[Wanted]:
        return [self.keeps] if self.keeps else ()

    def join(self, seat: Seat) -> None:
        """Take the seat. Raises WeightsError: the sender announces other parts than this process needs."""
        self.leave()
        self._use_device()
        manifest = Manifest.from_wire(seat.manifest)
        plan = SendPlan.from_wire(seat.plan, manifest, seat.world)
        kept = self.keeps if self.keeps and plan.brings(seat.rank, self.keeps) else None
        if plan.cuts and kept is None and not plan.brings(seat.rank, {}):
            raise WeightsError("the sender's parts do not add up to the tensors that this process needs")
        link = Link(
            host=seat.host,
            timeout_s=seat.timeout_s,
            backend=seat.backend,
            interface=seat.interface,
            device=self._device,
            seat=seat.rank,
            avoided=self._avoided,
        )
        for lane in sorted(set(plan.bucket_lanes)):  # in the same order at all ends
            ranks = plan.lanes[lane]
            if seat.rank in ranks:
                store = connect_store(seat.host, seat.port, seat.timeout_s)
                self._groups[lane] = WeightGroup(
                    store, link, epoch=seat.epoch, rank=ranks.index(seat.rank) + 1, world=len(ranks) + 1, name=str(lane)
                )
        self._receiver = BucketReceiver(plan, self._groups, link.place)
        self._stage_as(plan, kept)

    def _stage_as(self, plan: SendPlan, kept: Wanted | None) -> None:
        layout = plan.whole if kept is None else _manifest_of(plan.whole, kept)
        self._plan, self._targets = plan, {}
        if (layout, kept) != (self._layout, self._kept):
            self._layout, self._kept = layout, kept
            self._memory, self._spare = self._new_memory(), None
            self._offered = StagedTensors()
            self._outlines = plan.whole.shapes() if kept is not None else {}

    def _new_memory(self) -> _Memory:
        return _Memory(self._layout, pinned=self._device is not None)

    def _use_device(self) -> None:
        """Select the engine's GPU for this thread: what restores the previous stream would otherwise open a context on
        the first GPU."""
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def receive(self, event: Mapping[str, Any]) -> list[str]:
        if not self._groups or self._receiver is None or self._plan is None:
            raise RuntimeError("the group was left")
        self._use_device()
        self._leave_to_the_engine()
        whole_buckets = None if self._plan.cuts else self._memory.bucket
        with self._stream.used():
            return self._receiver.receive(self._target, whole_buckets)

    def _leave_to_the_engine(self) -> None:
        """Continue in other memory if the engine serves from this."""
        if not self._offered.kept:
            return
        self._offered, self._targets = StagedTensors(), {}
        self._memory, self._spare = self._spare or self._new_memory(), self._memory

    def _target(self, entry: str) -> torch.Tensor:
        """Place in staging of an entry of the plan."""
        found = self._targets.get(entry)
        if found is None:
            found = self._targets[entry] = self._place_of(entry)
        return found

    def _place_of(self, entry: str) -> torch.Tensor:
        assert self._plan is not None
        name, part = self._plan.parts[entry]
        if self._kept is None:
            return self._memory.view(name)[slices(part)]
        boxes = self._kept.get(name, (whole(self._outlines[name].shape),))
        number, box = next((number, box) for number, box in enumerate(boxes) if contains(box, part))
        return self._memory.view(f"{name}#{number}")[slices(within(box, part))]

    def staged(self) -> StagedTensors:
        """Views over the staging buffers, by Hugging Face name; valid until the next `receive`, unless kept. With
        parts, tensors that know only those (`sliced`)."""
        if self._plan is None:
            raise WeightsError("nothing was ever staged here")
        if self._kept is not None:
            held: dict[str, dict[Box, torch.Tensor]] = {}
            for name, outline in self._outlines.items():
                boxes = self._kept.get(name, (whole(outline.shape),))
                held[name] = {box: self._memory.view(f"{name}#{number}") for number, box in enumerate(boxes)}
            return StagedTensors(sliced(self._outlines, held))
        self._offered = StagedTensors({entry.name: self._memory.view(entry.name) for entry in self._layout.entries})
        return self._offered

    def changed(self) -> bool:
        return False

    def leave(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.abort()


class _Memory:
    """Buffers of a manifest, each allocated when it is first used, and views of them, made once: a model has hundreds
    and the engine is waiting."""

    def __init__(self, layout: Manifest, *, pinned: bool) -> None:
        self._layout, self._pinned = layout, pinned
        self._buffers: dict[int, torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._bucket_of = {entry.name: i for i, bucket in enumerate(layout.buckets) for entry in bucket.entries}

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._buffers.values()))

    def bucket(self, index: int) -> torch.Tensor:
        """Buffer [nbytes] uint8 of a bucket."""
        if index not in self._buffers:
            bucket = self._layout.buckets[index]
            buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            if self._pinned:  # a GPU reads it several times faster, and the engine is paused while it loads
                buffer = buffer.pin_memory()
            self._buffers[index] = buffer
            self._views |= bucket.views(buffer)
        return self._buffers[index]

    def view(self, name: str) -> torch.Tensor:
        """The tensor of this name."""
        if name not in self._views:
            self.bucket(self._bucket_of[name])
        return self._views[name]


def _manifest_of(manifest: Manifest, kept: Wanted) -> Manifest:
    """Manifest of parts of the tensors; part i of a tensor is called `name#i`."""
    return build_manifest(
        (
            (f"{entry.name}#{i}", sizes(box), entry.dtype)
            for entry in manifest.entries
            for i, box in enumerate(kept.get(entry.name, (whole(entry.shape),)))
        ),
        max((bucket.nbytes for bucket in manifest.buckets), default=0),
    )
