"""The workers of several servers as one member of the weight group: each server receives for itself, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from asyncrl.engines.vllm.receiver import VllmReceiver, agreed
from asyncrl.errors import ConfigError, EngineDiedError, GenerationError
from asyncrl.weights.broadcast.staging import Seat
from asyncrl.weights.sliced import Wanted

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedInServers:
    """Weights that lie, verified, in the staging of these servers."""

    shapes: Mapping[str, torch.Tensor]
    urls: Sequence[str]


class ServersReceiver:
    """Implements `weights.broadcast.staging.Receiver`. One thread uses it.

    Args:
        there: url -> (processes, which of its arrivals this is), of the servers that answer now.
        call: `call(url, method, *arguments)`: the answers of all workers of one.
        lost: told of one that gave none.
        broken: told of all that were to form a group which did not form.
        tensors: of the model; see `VllmReceiver`.
    """

    def __init__(
        self,
        there: Callable[[], Mapping[str, tuple[int, int]]],
        call: Callable[..., list[Any]],
        lost: Callable[[str, str], None],
        broken: Callable[[Sequence[str], str], None],
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._there, self._call, self._lost, self._broken = there, call, lost, broken
        self._tensors = tensors or {}
        self._receivers: dict[str, VllmReceiver] = {}
        self._asked: Mapping[str, tuple[int, int]] = {}
        self._wanted: Sequence[Wanted] = ()

    @property
    def width(self) -> int:
        """Servers that do not say what they keep are in no seat."""
        self._asked = dict(self._there())
        self._receivers = {url: self._receiver(url, width) for url, (width, _) in self._asked.items()}
        try:
            self._wanted = self._ask_for_parts()
        except RuntimeError as error:
            self._broken(tuple(self._receivers), str(error))
            return 0
        return sum(width for width, _ in self._asked.values())

    def wanted(self) -> Sequence[Wanted]:
        return self._wanted

    def _ask_for_parts(self) -> list[Wanted]:
        """Of each process, anew for each seat: a server that was started again knows nothing of its parts."""
        if not any(width > 1 for width, _ in self._asked.values()):
            return []
        found = self._each(lambda url, receiver: receiver.wanted() or [{}] * self._asked[url][0])
        return [each for parts in found for each in parts]

    def join(self, seat: Seat) -> None:
        if not self._receivers:
            raise RuntimeError("no server of engine.urls answers")
        seats, rank = {}, seat.rank
        for url, (width, _) in self._asked.items():
            seats[url], rank = replace(seat, rank=rank), rank + width
        try:
            self._each(lambda url, receiver: receiver.join(seats[url]))
        except RuntimeError as error:
            self._broken(tuple(self._receivers), str(error))
            raise

    def receive(self, event: Mapping[str, Any]) -> list[str]:
        asked = {key: value for key, value in event.items() if key != "canary"}  # bytes, which JSON has not
        answers = self._each(lambda _, receiver: receiver.receive(asked))
        return [agreed(prints) for prints in zip(*answers, strict=True)]

    def staged(self) -> StagedInServers:
        first = next(iter(self._receivers.values()))
        return StagedInServers(shapes=first.staged().shapes, urls=tuple(self._receivers))

    def changed(self) -> bool:
        """A server that is not there is none to send to, and one that is back waits for weights. While none is there,
        the seat is kept: there is nothing to join with."""
        there = self._there()
        return bool(there) and there != self._asked

    def leave(self) -> None:
        with suppress(RuntimeError):  # of a server that is lost now
            self._each(lambda _, receiver: receiver.leave())

    def _receiver(self, url: str, width: int) -> VllmReceiver:
        return VllmReceiver(lambda *asked: self._call(url, *asked), width, self._tensors if width > 1 else None)

    def _each(self, work: Callable[[str, VllmReceiver], Result]) -> list[Result]:
        """Of all, side by side: the group forms when everyone is there. Raises RuntimeError: one failed at it."""

        def done(url: str, receiver: VllmReceiver) -> Result:
            try:
                return work(url, receiver)
            except (EngineDiedError, ConfigError, GenerationError) as error:  # the others: it was started as another
                self._lost(url, str(error))
                raise RuntimeError(str(error)) from error

        with ThreadPoolExecutor(len(self._receivers) or 1, thread_name_prefix="weights-servers") as pool:
            jobs = [pool.submit(done, url, receiver) for url, receiver in self._receivers.items()]
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:
            raise errors[0]
        return [job.result() for job in jobs]
