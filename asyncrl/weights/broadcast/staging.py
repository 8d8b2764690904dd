"""Where the bytes of a broadcast land: the seam between the handshake of an epoch and the engine that will load them.

    join(seat) -> receive(event) -> fingerprints -> `load(staged())` by the engine -> receive ... -> leave()

`Staging` receives in the process of the subscriber. An engine whose model lives in processes of its own brings a
`Receiver` that runs one `Staging` in each of them, so that no byte takes a detour.

*Staging* is that place, in one process, and nothing else. What lies in it, whole and verified, is *staged*:
`StagedTensors` where the engine is in this process; a reference to it where it is in others (vLLM's `StagedInWorkers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.base import StagedTensors
from asyncrl.weights.broadcast.group import WeightGroup, connect_store, passed
from asyncrl.weights.broadcast.landing import FlowLanding
from asyncrl.weights.delta import Encoded, apply, payload_limit
from asyncrl.weights.fingerprint import Fingerprint, bucket_fingerprint
from asyncrl.weights.flows import Flow, Flows, entries, lane_name
from asyncrl.weights.manifest import Manifest, build_manifest
from asyncrl.weights.plan import Box, contains, whole, within
from asyncrl.weights.shares import slices
from asyncrl.weights.sliced import Wanted, sliced


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A member's place in one epoch of the group. Plain values: it crosses into an engine's own processes."""

    host: str
    port: int
    backend: str
    epoch: int
    rank: int
    """The first of the member's ranks, where it has several."""
    world: int
    timeout_s: float
    manifest: list[Any]
    """As from `Manifest.to_wire`."""
    interface: str = ""
    """`weights.interface` of the member."""
    flows: list[Any] = field(default_factory=list)
    """As from `Flows.to_wire`, where several learner ranks send, or members get parts of tensors."""


class Receiver(Protocol):
    @property
    def width(self) -> int:
        """Ranks it occupies in the group: processes that receive. With none it is asked again until it has one."""
        ...

    def wanted(self) -> Sequence[Wanted]:
        """Of each of its ranks what it stages; nothing where all stage whole tensors. Asked before each seat."""
        ...

    def join(self, seat: Seat) -> None:
        """Take the seat; the seat before is left. Raises RuntimeError when the group does not form in time."""
        ...

    def receive(self, event: Mapping[str, Any]) -> list[str]:
        """All buckets of the version that `event` announced, into staging; nothing is loaded.

        Returns:
            Their fingerprints, recomputed where the bytes lie. A bucket on which its processes differ has none that
            could match, one that is for none of them is "".

        Raises:
            RuntimeError: a member of the group died or fell silent. Whatever is staged is worthless.
        """
        ...

    def staged(self) -> Any:
        """What `load` is called with after a `receive` whose fingerprints matched."""
        ...

    def changed(self) -> bool:
        """Whether its processes are no longer those that took the seat: it then joins anew, and what was served before
        has to be loaded again."""
        ...

    def leave(self) -> None:
        """Leave the group at once; staging is kept. Never raises."""
        ...


class Staging:
    """Implements `Receiver` in this process, with all buckets in host memory.

    `device` is where nccl and ipc receive, a piece at a time, and where the fingerprints of that are taken: a whole
    model would not fit on a GPU beside an engine that fills it. gloo receives in host memory.
    """

    width = 1

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.keeps: Wanted | None = None
        """What the engine of this process takes of the tensors, where it was told: it then gets no more if the sender
        can do that."""
        self._groups: list[WeightGroup] = []
        self._parts: list[tuple[Flow, FlowLanding]] = []
        """Of each sender, where there are flows."""
        self._manifest: Manifest | None = None
        self._kept: Wanted | None = None
        """Of what is staged, if that is parts."""
        self._place: torch.device | str = "cpu"
        self._buffers: list[torch.Tensor] = []
        self._views: dict[str, torch.Tensor] = {}
        """Of `_buffers`; made once, since a model has hundreds and the engine is waiting. Not of parts."""
        self._held: dict[str, dict[Box, torch.Tensor]] = {}
        """Of `_buffers`, of parts: by tensor and box."""
        self._outlines: Mapping[str, torch.Tensor] = {}
        """Of parts: the whole tensors, without data."""
        self._spare: tuple[list[torch.Tensor], dict[str, torch.Tensor]] | None = None
        """Buffers and views that an engine, which keeps staged tensors, has given up for them."""
        self._offered = StagedTensors()
        self._complete: int | None = None
        """Version whose bytes the buffers hold, whole: what a delta may be applied to."""

    @property
    def nbytes(self) -> int:
        """Of what is staged."""
        return sum(map(len, self._buffers))

    def wanted(self) -> Sequence[Wanted]:
        return [self.keeps] if self.keeps else ()

    def join(self, seat: Seat) -> None:
        """Raises WeightsError: the parts that the senders announce are not those that this process has to get."""
        self.leave()
        manifest = Manifest.from_wire(seat.manifest)
        flows = Flows.from_wire(seat.flows, manifest) if seat.flows else None
        kept = self.keeps if flows is not None and self.keeps and flows.brings(seat.rank, self.keeps) else None
        if flows is not None and kept is None and not flows.brings(seat.rank, {}):
            raise WeightsError("the senders' shares do not put the tensors together that this process needs")
        place = self._device if seat.backend != "gloo" and self._device is not None else "cpu"
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
        if place != "cpu":
            # The engine stands still while it loads: from pinned memory that is several times shorter.
            self._buffers = [buffer.pin_memory() for buffer in self._buffers]
        views = held.views(self._buffers)
        if kept is None:
            self._views = views
            return
        self._outlines = manifest.shapes()
        for entry in entries(manifest):
            boxes = kept.get(entry.name, (whole(entry.shape),))
            self._held[entry.name] = {box: views[f"{entry.name}#{i}"] for i, box in enumerate(boxes)}

    def _join_sender(self, seat: Seat, sender: int, flows: Flows | None) -> None:
        """Its groups that this process is in, in the order of all ends."""

        def group(lane: int, receivers: Sequence[int]) -> WeightGroup:
            self._groups.append(WeightGroup(
                connect_store(seat.host, seat.port, seat.timeout_s), backend=seat.backend, host=seat.host,
                epoch=seat.epoch, rank=receivers.index(seat.rank) + 1, world=len(receivers) + 1,
                timeout_s=seat.timeout_s, device=self._device, interface=seat.interface,
                name=lane_name(sender, lane),
            ))  # fmt: skip
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
            raise RuntimeError(f"a delta came for version {event['base']}, and {base} is what is staged here")
        self._leave_to_the_engine(bool(event.get("delta")))
        if self._parts:
            prints = self._receive_flows()
        elif event.get("delta"):
            prints = self._receive_delta(self._groups[0], event["delta"])
        else:
            prints = self._receive_full(self._groups[0])
        self._complete = int(event["policy_version"])
        return prints

    def _leave_to_the_engine(self, with_bytes: bool) -> None:
        """Go on in other buffers if the engine serves from these; `with_bytes` of what is staged."""
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
            prints[index].update(landed)  # the next one is arriving
        return [fingerprint.hex() for fingerprint in prints]

    def _receive_flows(self) -> list[str]:
        """From all senders at once, a thread for each; fingerprints of their buckets, sender after sender."""
        with ThreadPoolExecutor(len(self._parts), thread_name_prefix="weights-share") as threads:
            works = [threads.submit(landing.receive, self._targets(flow)) for flow, landing in self._parts]
            broken = ""
            for work in as_completed(works):  # each is bounded by its groups; the first that breaks ends the others
                if (error := work.exception()) is not None and not broken:
                    broken = str(error).splitlines()[0]
                    self.leave()
        if broken:
            # Another error: those that are there would be held by this frame, and hold groups with open sockets.
            raise RuntimeError(broken)
        return [fingerprint for work in works for fingerprint in work.result()]

    def _targets(self, flow: Flow) -> dict[str, torch.Tensor]:
        """By part of the flow: where it belongs in staging. Not of those that do not come here."""
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
        """Bucket, piece and where it lands; the group; and where it lands."""
        for index, buffer in enumerate(self._buffers):
            for piece in group.pieces(buffer):
                landing = self._landing(piece)
                yield (index, piece, landing), group, landing

    def _landing(self, piece: torch.Tensor) -> torch.Tensor:
        """What the group receives into for `piece`: itself, or room for it on the device."""
        return piece if self._place == "cpu" else torch.empty_like(piece, device=self._place)

    def _receive_delta(self, group: WeightGroup, headers: Sequence[Sequence[Any]]) -> list[str]:
        """Fingerprints of the buckets that result."""
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
        """Views over the staging buffers, by Hugging Face name: valid until the next `receive`, unless kept. Of parts,
        tensors that know those alone (`sliced`)."""
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
    """Of parts of its tensors; number i of a tensor is called `name#i`."""
    return build_manifest(
        (
            (f"{entry.name}#{i}", tuple(stop - start for start, stop in box), entry.dtype)
            for entry in entries(manifest)
            for i, box in enumerate(kept.get(entry.name, (whole(entry.shape),)))
        ),
        max((bucket.nbytes for bucket in manifest.buckets), default=0),
    )
