"""Staging of broadcast weights: the interface between the handshake of an epoch and the engine that loads them.

    join(seat) -> receive(event) -> fingerprints -> `load(staged())` by the engine -> receive ... -> leave()

`Staging` receives in the process of the subscriber. An engine whose model runs in other processes provides a
`Receiver` that runs one `Staging` in each of them, so that no byte takes a detour.

*Staging* is the memory that receives, in one process. Its contents, once complete and verified, are *staged*:
`StagedTensors` if the engine is in this process; a reference to them if it runs in others (vLLM's `StagedInWorkers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.base import StagedTensors
from asyncrl.weights.boxes import Box, contains, sizes, whole, within
from asyncrl.weights.broadcast.group import WeightGroup, connect_store, passed
from asyncrl.weights.broadcast.landing import FlowLanding
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.delta import Encoded, apply, payload_limit
from asyncrl.weights.fingerprint import Fingerprint, bucket_fingerprint
from asyncrl.weights.flows import Flow, Flows, lane_name
from asyncrl.weights.manifest import Manifest, build_manifest
from asyncrl.weights.shares import slices
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
    flows: list[Any] = field(default_factory=list)
    """From `Flows.to_wire`, if several learner ranks send, or members get parts of tensors."""


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
    not fit on a GPU beside an engine that fills it. gloo receives in host memory.
    """

    width = 1

    def __init__(self, device: torch.device | None = None) -> None:
        self._device, self._stream = device, SideStream(device)
        self._avoided: dict[str, float] = {}
        self.keeps: Wanted | None = None
        """Parts of the tensors that this process's engine reads, if known: it then gets no more than those if the
        sender supports that."""
        self._groups: list[WeightGroup] = []
        self._parts: list[tuple[Flow, FlowLanding]] = []
        """Flow and landing of each sender, if there are flows."""
        self._manifest: Manifest | None = None
        self._kept: Wanted | None = None
        """Parts that are staged; None for whole tensors."""
        self._place: torch.device | str = "cpu"
        self._buffers: list[torch.Tensor] = []
        self._views: dict[str, torch.Tensor] = {}
        """Views of `_buffers`; made once, since a model has hundreds and the engine is waiting. Empty with parts."""
        self._held: dict[str, dict[Box, torch.Tensor]] = {}
        """Views of `_buffers` with parts, by tensor and box."""
        self._outlines: Mapping[str, torch.Tensor] = {}
        """With parts: the whole tensors, without data."""
        self._spare: tuple[list[torch.Tensor], dict[str, torch.Tensor]] | None = None
        """Buffers and views that an engine, which keeps staged tensors, has returned in exchange."""
        self._offered = StagedTensors()
        self._complete: int | None = None
        """Version whose bytes the buffers hold completely, so that a delta may be applied; None if incomplete."""

    @property
    def nbytes(self) -> int:
        """Bytes of staging."""
        return sum(map(len, self._buffers))

    def wanted(self) -> Sequence[Wanted]:
        return [self.keeps] if self.keeps else ()

    def join(self, seat: Seat) -> None:
        """Take the seat. Raises WeightsError: the senders announce other parts than this process needs."""
        self.leave()
        manifest = Manifest.from_wire(seat.manifest)
        flows = Flows.from_wire(seat.flows, manifest) if seat.flows else None
        kept = self.keeps if flows is not None and self.keeps and flows.brings(seat.rank, self.keeps) else None
        if flows is not None and kept is None and not flows.brings(seat.rank, {}):
            raise WeightsError("the senders' shares do not add up to the tensors that this process needs")
        place = self._link(seat).place
        if (manifest, kept, place) != (self._manifest, self._kept, self._place) or not self._buffers:
            self._allocate(manifest, kept, place)
        self._parts = []
        for sender in range(len(flows.of) if flows is not None else 1):
            self._join_sender(seat, sender, flows)

    def _allocate(self, manifest: Manifest, kept: Wanted | None, place: torch.device | str) -> None:
        self._buffers, self._views, self._held, self._spare, self._complete = [], {}, {}, None, None
        self._offered = StagedTensors()
        self._manifest, self._kept, self._place = manifest, kept, place
        held = manifest if kept is None else _manifest_of(manifest, kept)
        self._buffers = held.allocate()
        if self._device is not None:
            # The engine is paused while it loads; a GPU reads pinned memory several times faster.
            self._buffers = [buffer.pin_memory() for buffer in self._buffers]
        views = held.views(self._buffers)
        if kept is None:
            self._views = views
            return
        self._outlines = manifest.shapes()
        for entry in manifest.entries:
            boxes = kept.get(entry.name, (whole(entry.shape),))
            self._held[entry.name] = {box: views[f"{entry.name}#{i}"] for i, box in enumerate(boxes)}

    def _link(self, seat: Seat) -> Link:
        return Link(
            host=seat.host,
            timeout_s=seat.timeout_s,
            backend=seat.backend,
            interface=seat.interface,
            device=self._device,
            seat=seat.rank,
            avoided=self._avoided,
        )

    def _join_sender(self, seat: Seat, sender: int, flows: Flows | None) -> None:
        """Join those groups of a sender that this process is in, in the same order at all ends."""
        link = self._link(seat)

        def group(lane: int, receivers: Sequence[int]) -> WeightGroup:
            store = connect_store(seat.host, seat.port, seat.timeout_s)
            rank, world, name = receivers.index(seat.rank) + 1, len(receivers) + 1, lane_name(sender, lane)
            self._groups.append(WeightGroup(store, link, epoch=seat.epoch, rank=rank, world=world, name=name))
            return self._groups[-1]

        if flows is None:
            group(0, range(1, seat.world))
            return
        flow = flows.of[sender]
        groups = {
            lane: group(lane, flows.lanes[lane]) for lane in sorted(set(flow.lanes)) if seat.rank in flows.lanes[lane]
        }
        ways = [groups.get(lane) for lane in flow.lanes]
        self._parts.append((flow, FlowLanding(flow.manifest.buckets, ways, self._place)))

    def receive(self, event: Mapping[str, Any]) -> list[str]:
        if not self._groups:
            raise RuntimeError("the group was left")
        base, self._complete = self._complete, None
        if event.get("delta") and base != event["base"]:
            raise RuntimeError(f"received a delta for version {event['base']}, but version {base} is staged here")
        self._leave_to_the_engine(bool(event.get("delta")))
        with self._stream.used():
            if self._parts:
                prints = self._receive_flows()
            elif event.get("delta"):
                prints = self._receive_delta(self._groups[0], event["delta"])
            else:
                prints = self._receive_full(self._groups[0])
        self._complete = int(event["policy_version"])
        return prints

    def _leave_to_the_engine(self, with_bytes: bool) -> None:
        """Continue in other buffers if the engine serves from these; `with_bytes` copies their contents over."""
        if not self._offered.kept:
            return
        self._offered = StagedTensors()
        assert self._manifest is not None
        engines, views = self._buffers, self._views
        if self._spare is None:
            self._buffers = self._manifest.allocate()
            self._views = self._manifest.views(self._buffers)
        else:
            self._buffers, self._views = self._spare
        self._spare = engines, views
        if with_bytes:
            for ours, theirs in zip(self._buffers, engines, strict=True):
                ours.copy_(theirs)

    def _receive_full(self, group: WeightGroup) -> list[str]:
        prints = [Fingerprint() for _ in self._buffers]
        for index, piece, landed in passed(self._places(group)):
            if landed is not piece:
                piece.copy_(landed)
            prints[index].update(landed)  # while the next one arrives
        return [fingerprint.hex() for fingerprint in prints]

    def _receive_flows(self) -> list[str]:
        """Receive from all senders at once, one thread each; returns the fingerprints of their buckets, sender by
        sender."""
        with ThreadPoolExecutor(len(self._parts), thread_name_prefix="weights-share") as threads:
            works = [threads.submit(self._receive_flow, flow, landing) for flow, landing in self._parts]
            broken = ""
            for work in as_completed(works):  # each is bounded by its groups; the first failure ends the others
                if (error := work.exception()) is not None and not broken:
                    broken = str(error).splitlines()[0]
                    self.leave()
        if broken:
            # A new error: the caught ones would be referenced by this frame, and keep groups with open sockets alive.
            raise RuntimeError(broken)
        return [fingerprint for work in works for fingerprint in work.result()]

    def _receive_flow(self, flow: Flow, landing: FlowLanding) -> list[str]:
        with self._stream.used():  # each thread has its own choice of a stream
            return landing.receive(self._targets(flow))

    def _targets(self, flow: Flow) -> dict[str, torch.Tensor]:
        """Place in staging of each part of the flow. Parts that are not sent here are left out."""
        targets = {}
        for entry, (name, part) in flow.parts.items():
            if self._kept is None:
                targets[entry] = self._views[name][slices(part)]
                continue
            for box, values in self._held[name].items():
                if contains(box, part):
                    targets[entry] = values[slices(within(box, part))]
        return targets

    def _places(
        self, group: WeightGroup
    ) -> Iterator[tuple[tuple[int, torch.Tensor, torch.Tensor], WeightGroup, torch.Tensor]]:
        """Yield (bucket index, piece, landing), the group, and the landing: the memory that it is received into."""
        for index, buffer in enumerate(self._buffers):
            for piece in group.pieces(buffer):
                landing = self._landing(piece)
                yield (index, piece, landing), group, landing

    def _landing(self, piece: torch.Tensor) -> torch.Tensor:
        """Memory that the group receives `piece` into: the piece itself, or a buffer on the device."""
        return piece if self._place == "cpu" else torch.empty_like(piece, device=self._place)

    def _receive_delta(self, group: WeightGroup, headers: Sequence[Sequence[Any]]) -> list[str]:
        """Receive a delta; returns the fingerprints of the resulting buckets."""
        assert self._manifest is not None
        prints = []
        for bucket, buffer, header in zip(self._manifest.buckets, self._buffers, headers, strict=True):
            payload = torch.empty(payload_limit(header, bucket.nbytes), dtype=torch.uint8, device=self._place)
            for _ in passed((None, group, piece) for piece in group.pieces(payload)):
                pass
            apply(Encoded(kind=header[0], payload=payload.cpu(), changed=int(header[2])), buffer, bucket.element_bytes)
            prints.append(bucket_fingerprint(buffer))
        return prints

    def staged(self) -> StagedTensors:
        """Views over the staging buffers, by Hugging Face name; valid until the next `receive`, unless kept. With
        parts, tensors that know only those (`sliced`)."""
        if self._manifest is None:
            raise WeightsError("nothing was ever staged here")
        if self._kept is not None:
            return StagedTensors(sliced(self._outlines, self._held))
        self._offered = StagedTensors(self._views)
        return self._offered

    def changed(self) -> bool:
        return False

    def leave(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            group.abort()


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
