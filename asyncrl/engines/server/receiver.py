"""The workers of several servers as one member of the weight group: all servers receive concurrently."""

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
    """Verified weights in the staging of these servers."""

    shapes: Mapping[str, torch.Tensor]
    urls: Sequence[str]


class ServersReceiver:
    """Implements `weights.broadcast.staging.Receiver`. Used by one thread.

    Args:
        there: returns url -> (number of processes, number of this arrival) of the servers that answer now.
        call: `call(url, method, *arguments)` returns the answers of all workers of one server.
        lost: called with a server that did not answer.
        broken: called with all servers that were to form a group which did not form.
        tensors: the model's tensors; see `VllmReceiver`.
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
        """Number of ranks of all servers; 0 while a server does not report which parts it keeps, so that no seat is
        taken."""
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
        """Parts wanted by each process, asked again for each seat: a restarted server does not know its parts."""
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
        asked = {key: value for key, value in event.items() if key != "canary"}  # bytes, which JSON lacks
        answers = self._each(lambda _, receiver: receiver.receive(asked))
        return [agreed(prints) for prints in zip(*answers, strict=True)]

    def staged(self) -> StagedInServers:
        first = next(iter(self._receivers.values()))
        return StagedInServers(shapes=first.staged().shapes, urls=tuple(self._receivers))

    def changed(self) -> bool:
        """Whether the servers differ from those of the seat: a lost one cannot be sent to, and a returning one waits
        for weights. While there is none, the seat is kept: there is nothing to join with."""
        there = self._there()
        return bool(there) and there != self._asked

    def leave(self) -> None:
        with suppress(RuntimeError):  # of a server that has been lost
            self._each(lambda _, receiver: receiver.leave())

    def _receiver(self, url: str, width: int) -> VllmReceiver:
        return VllmReceiver(lambda *asked: self._call(url, *asked), width, self._tensors if width > 1 else None)

    def _each(self, work: Callable[[str, VllmReceiver], Result]) -> list[Result]:
        """Run `work` for all servers concurrently, since the group forms only when all have joined. Raises
        RuntimeError: one failed."""

        def done(url: str, receiver: VllmReceiver) -> Result:
            try:
                return work(url, receiver)
            except (EngineDiedError, ConfigError, GenerationError) as error:  # the last two: it came back as another
                self._lost(url, str(error))
                raise RuntimeError(str(error)) from error

        with ThreadPoolExecutor(len(self._receivers) or 1, thread_name_prefix="weights-servers") as pool:
            jobs = [pool.submit(done, url, receiver) for url, receiver in self._receivers.items()]
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:
            raise errors[0]
        return [job.result() for job in jobs]
