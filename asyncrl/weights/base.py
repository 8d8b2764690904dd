"""The weights seam: publisher in the learner, subscriber in each rollout worker, one file per transport.

    publish(v): every learner rank gathers on a thread; rank 0 keeps a snapshot and sends it from another
    receive(v): bytes into staging -> fingerprints recomputed -> `load` into the engine between steps -> served(v)

A version counts as served only after its fingerprint matched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from asyncrl.weights.canary import Canary


class StagedTensors(dict[str, torch.Tensor]):
    """Tensors in staging. An engine may keep them instead of copying, and says so: staging then goes on elsewhere."""

    kept = False


LoadWeights = Callable[[int, Mapping[str, torch.Tensor]], None]
"""`load(policy_version, tensors)`: swap all tensors into the engine at once; blocks until it serves them."""


class PublisherRendezvous(Protocol):
    """The part of the replay client a publisher needs (wired by the learner; weights never imports replay)."""

    def announce(self, values: dict[str, Any]) -> None: ...
    def members(self) -> list[Any]:
        """Live subscribers, each with `worker`, `incarnation` and `policy_version`."""
        ...


class SubscriberRendezvous(Protocol):
    """The part of the replay client a subscriber needs, blocking (the worker wraps its async client)."""

    def watch(self, revision: int, wait_s: float) -> Any:
        """Board with `.revision` and `.values`."""
        ...

    def served(self, policy_version: int, fingerprint: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats:
    """Of one `publish`."""

    wait_previous_s: float
    """Seconds that the call waited: for the copy of the version before, if nobody had waited for that, and until a
    snapshot was free, when two versions were on their way."""
    nbytes: int


class Publisher(Protocol):
    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]], canary: Canary | None = None
    ) -> PublishStats:
        """Snapshot `(name, shard or tensor)` pairs under this version and send them in the background.

        Collective over the learner ranks: DTensors are cast to the wire dtype, then gathered, in this order. Waits
        (bounded) for the copy before, and for a snapshot that is not on its way. `canary` goes with the version, to be
        proven by the engines. The tensors may still be read after it returns: see `copied`. Nothing of the version
        leaves before `tensors` has given all of them.

        Raises:
            WeightsError: a version before could not be copied or sent; no snapshot became free in time; the names are
                not those of the first call.
        """
        ...

    def wait_copied(self) -> float:
        """Until the tensors of the last `publish` are copied (bounded): before a further version is announced.

        Returns the seconds that took. Raises WeightsError if the copy failed: that version is not sent.
        """
        ...

    def copied(self) -> Iterator[Sequence[torch.Tensor]]:
        """For who wants to write to the tensors of the last `publish`: while they are being copied, some of them, as
        often as nothing reads those any more (bounded). When it ends nothing reads any.

        Raises WeightsError if the copy failed: that version is not sent.
        """
        ...

    def stats(self) -> dict[str, float]:
        """`weights/*` metrics: wire seconds, engines served, re-sends, epoch.

        Those of one send appear together when everyone has answered, with `weights/sent_version`, its version.
        """
        ...

    def close(self, *, failed: bool = False) -> None:
        """Let what is on its way arrive. `failed`: this rank ends by an error, and the others wait for it in vain."""
        ...


class Subscriber(Protocol):
    """Runs its own thread from construction to `close`."""

    @property
    def policy_version(self) -> int: ...

    @property
    def proven(self) -> bool:
        """Whether what the engine makes now may leave the worker: false while a version waits for its canary."""
        ...

    def check(self) -> None:
        """Raise the error that stopped the thread, if one did."""
        ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...
