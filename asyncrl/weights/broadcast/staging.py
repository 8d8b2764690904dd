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
from asyncrl.weights.broadcast.landing import ShareLanding
from asyncrl.weights.delta import Encoded, apply, payload_limit
from asyncrl.weights.fingerprint import Fingerprint, bucket_fingerprint
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.shares import Shares


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
    shares: list[Any] = field(default_factory=list)
    """As from `Shares.to_wire`, where several learner ranks send: each in a group of its own."""


class Receiver(Protocol):
    @property
    def width(self) -> int:
        """Ranks it occupies in the group: processes that receive. With none it is asked again until it has one."""
        ...

    def join(self, seat: Seat) -> None:
        """Take the seat; the seat before is left. Raises RuntimeError when the group does not form in time."""
        ...

    def receive(self, event: Mapping[str, Any]) -> list[str]:
        """All buckets of the version that `event` announced, into staging; nothing is loaded.

        Returns:
            Their fingerprints, recomputed where the bytes lie. A bucket on which its processes differ has none that
            could match.

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
        self._groups: list[WeightGroup] = []
        self._parts: list[ShareLanding] = []
        """Of each sender, where there are several."""
        self._manifest: Manifest | None = None
        self._place: torch.device | str = "cpu"
        self._buffers: list[torch.Tensor] = []
        self._views: dict[str, torch.Tensor] = {}
        """Of `_buffers`; made once, since a model has hundreds and the engine is waiting."""
        self._spare: tuple[list[torch.Tensor], dict[str, torch.Tensor]] | None = None
        """Buffers and views that an engine, which keeps staged tensors, has given up for them."""
        self._offered = StagedTensors()
        self._complete: int | None = None
        """Version whose bytes the buffers hold, whole: what a delta may be applied to."""

    def join(self, seat: Seat) -> None:
        self.leave()
        manifest = Manifest.from_wire(seat.manifest)
        place = self._device if seat.backend != "gloo" and self._device is not None else "cpu"
        if (manifest, place) != (self._manifest, self._place) or not self._buffers:
            self._buffers, self._views, self._spare, self._complete = [], {}, None, None
            self._offered = StagedTensors()
            self._buffers, self._manifest, self._place = manifest.allocate(), manifest, place
            if place != "cpu":
                # The engine stands still while it loads: from pinned memory that is several times shorter.
                self._buffers = [buffer.pin_memory() for buffer in self._buffers]
            self._views = manifest.views(self._buffers)
        self._parts = []
        if seat.shares:
            self._parts = [ShareLanding(share, place) for share in Shares.from_wire(seat.shares, manifest).of]
        for sender in range(max(len(seat.shares), 1)):
            self._groups.append(WeightGroup(
                connect_store(seat.host, seat.port, seat.timeout_s), backend=seat.backend, host=seat.host,
                epoch=seat.epoch, rank=seat.rank, world=seat.world, timeout_s=seat.timeout_s, device=self._device,
                interface=seat.interface, sender=sender,
            ))  # fmt: skip

    def receive(self, event: Mapping[str, Any]) -> list[str]:
        if not self._groups:
            raise RuntimeError("the group was left")
        base, self._complete = self._complete, None
        if event.get("delta") and base != event["base"]:
            raise RuntimeError(f"a delta came for version {event['base']}, and {base} is what is staged here")
        self._leave_to_the_engine(bool(event.get("delta")))
        if self._parts:
            prints = self._receive_shares()
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
        for index, piece, landed in passed(group, self._places(group)):
            if landed is not piece:
                piece.copy_(landed)
            prints[index].update(landed)  # the next one is arriving
        return [fingerprint.hex() for fingerprint in prints]

    def _receive_shares(self) -> list[str]:
        """From all senders at once, a thread for each; fingerprints of their buckets, sender after sender."""
        groups, views = list(self._groups), self._views
        with ThreadPoolExecutor(len(groups), thread_name_prefix="weights-share") as threads:
            works = [
                threads.submit(part.receive, group, views) for part, group in zip(self._parts, groups, strict=True)
            ]
            broken = ""
            for work in as_completed(works):  # each is bounded by its group; the first that breaks ends the others
                if (error := work.exception()) is not None and not broken:
                    broken = str(error).splitlines()[0]
                    self.leave()
        if broken:
            # Another error: those that are there would be held by this frame, and hold groups with open sockets.
            raise RuntimeError(broken)
        return [fingerprint for work in works for fingerprint in work.result()]

    def _places(self, group: WeightGroup) -> Iterator[tuple[tuple[int, torch.Tensor, torch.Tensor], torch.Tensor]]:
        """Bucket, piece and where it lands; and where it lands."""
        for index, buffer in enumerate(self._buffers):
            for piece in group.pieces(buffer):
                landing = self._landing(piece)
                yield (index, piece, landing), landing

    def _landing(self, piece: torch.Tensor) -> torch.Tensor:
        """What the group receives into for `piece`: itself, or room for it on the device."""
        return piece if self._place == "cpu" else torch.empty_like(piece, device=self._place)

    def _receive_delta(self, group: WeightGroup, headers: Sequence[Sequence[Any]]) -> list[str]:
        """Fingerprints of the buckets that result."""
        assert self._manifest is not None
        prints = []
        for bucket, buffer, header in zip(self._manifest.buckets, self._buffers, headers, strict=True):
            payload = torch.empty(payload_limit(header, bucket.nbytes), dtype=torch.uint8, device=self._place)
            for _ in passed(group, ((None, piece) for piece in group.pieces(payload))):
                pass
            apply(Encoded(kind=header[0], payload=payload.cpu(), changed=int(header[2])), buffer, bucket.element_bytes)
            prints.append(bucket_fingerprint(buffer))
        return prints

    def staged(self) -> StagedTensors:
        """Views over the staging buffers, by Hugging Face name: valid until the next `receive`, unless kept."""
        if self._manifest is None:
            raise WeightsError("nothing was ever staged here")
        self._offered = StagedTensors(self._views)
        return self._offered

    def changed(self) -> bool:
        return False

    def leave(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            group.abort()
