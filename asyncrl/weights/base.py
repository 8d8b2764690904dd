"""Interface of weight transfer: a publisher in the learner, a subscriber in each rollout worker, one file per
transport.

    publish(v): the learner's ranks gather bucket after bucket out of the live parameters; rank 0 sends them
    receive(v): bytes into staging -> fingerprints recomputed -> `load` into the engine between steps -> served(v)

A version counts as served only after its fingerprint matched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    """Seconds that the call waited until the previous version was sent, if nobody had waited for it."""
    nbytes: int


class Publisher(Protocol):
    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]], canary: Canary | None = None
    ) -> PublishStats:
        """Send `(name, shard or tensor)` pairs under this version, read out of these tensors.

        Collective over the learner ranks: DTensors are cast to the wire dtype, then gathered, in this order. Waits
        (bounded) until the previous version was sent once. `canary` is sent with the version, and the engines are
        verified against it. The tensors may still be read after the call returns: see `wait`. Nothing of the version
        is sent before `tensors` is exhausted.

        Raises:
            WeightsError: a version could not be gathered or sent in time; the names differ from those of the first
                call.
        """
        ...

    def wait_sent(self) -> float:
        """Wait (bounded) until the last `publish` was sent once; called before a further version is announced.

        Returns the seconds that took. Raises WeightsError if it can never be sent.
        """
        ...

    def wait(self) -> float:
        """Wait (bounded) until nothing reads the tensors of the last `publish` any more, for a caller that writes to
        them then; returns the seconds. Raises WeightsError if that version can never be sent."""
        ...

    @property
    def meets(self) -> bool:
        """Whether all ranks have to call `serve` at least every second while they wait for something and the weights do
        not change. Otherwise a thread of rank 0 serves newcomers then. Known after the first `publish`."""
        ...

    def serve(self) -> None:
        """Send the last version to whoever waits for it. Collective."""
        ...

    def stats(self) -> dict[str, float]:
        """`weights/*` metrics: wire seconds, engines served, re-sends, epoch.

        Those of one send appear together once every engine has answered, with its version as `weights/sent_version`.
        """
        ...

    def close(self, *, failed: bool = False) -> None:
        """Let pending sends finish. `failed`: this rank ends with an error, so the other ranks wait for it in vain."""
        ...
