"""Interface of weight transfer: a publisher in the learner, a subscriber in each rollout worker, one file per
transport.

    publish(v): every learner rank gathers on a thread; rank 0 keeps a snapshot and sends it on another thread
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
    """Tensors in staging. An engine that keeps them instead of copying sets `kept`; staging then continues in other
    memory."""

    kept = False


LoadWeights = Callable[[int, Mapping[str, torch.Tensor]], None]
"""`load(policy_version, tensors)`: swap all tensors into the engine at once; blocks until the engine serves them."""


class PublisherRendezvous(Protocol):
    """The part of the replay client that a publisher needs (passed in by the learner; weights never imports replay)."""

    def announce(self, values: dict[str, Any]) -> None: ...
    def members(self) -> list[Any]:
        """Live subscribers, each with `worker`, `incarnation` and `policy_version`."""
        ...


class SubscriberRendezvous(Protocol):
    """The part of the replay client that a subscriber needs, with blocking calls (the worker wraps its async
    client)."""

    def watch(self, revision: int, wait_s: float) -> Any:
        """Return the board, with `.revision` and `.values`."""
        ...

    def served(self, policy_version: int, fingerprint: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats:
    wait_previous_s: float
    """Seconds that the call waited: for the copy of the previous version, if nobody had waited for it, and for a free
    snapshot, if two versions were still being sent."""
    nbytes: int


class Publisher(Protocol):
    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]], canary: Canary | None = None
    ) -> PublishStats:
        """Snapshot `(name, shard or tensor)` pairs under this version and send them in the background.

        Collective over the learner ranks: DTensors are cast to the wire dtype, then gathered, in this order. Waits
        (bounded) for the previous copy, and for a snapshot that is not being sent. `canary` is sent with the version,
        and the engines are verified against it. The tensors may still be read after the call returns: see `copied`.
        Nothing of the version is sent before `tensors` is exhausted.

        Raises:
            WeightsError: a previous version could not be copied or sent; no snapshot became free in time; the names
                differ from those of the first call.
        """
        ...

    def wait_copied(self) -> float:
        """Wait (bounded) until the tensors of the last `publish` are copied; called before a further version is
        announced.

        Returns the seconds that took. Raises WeightsError if the copy failed: that version is not sent.
        """
        ...

    def copied(self) -> Iterator[Sequence[torch.Tensor]]:
        """Iterate while the tensors of the last `publish` are being copied, for a caller that wants to write to them:
        yields some of them each time nothing reads those any more (bounded). When it ends nothing reads any of them.

        Raises WeightsError if the copy failed: that version is not sent.
        """
        ...

    def stats(self) -> dict[str, float]:
        """`weights/*` metrics: wire seconds, engines served, re-sends, epoch.

        Those of one send appear together once every engine has answered, with its version as `weights/sent_version`.
        """
        ...

    def close(self, *, failed: bool = False) -> None:
        """Let pending sends finish. `failed`: this rank ends with an error, so the other ranks wait for it in vain."""
        ...
