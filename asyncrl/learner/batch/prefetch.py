"""Requests to the replay server in the background: the next batch, while the current one is trained on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol

from asyncrl.background import in_background
from asyncrl.errors import NoProgress
from asyncrl.replay.protocol import Lease
from asyncrl.spans import span

LOOK_S = 0.2
"""Seconds between two checks whether the learner is to stop."""


class Source(Protocol):
    """Where batches come from, and what keeps them until they are saved: `LearnerReplay`, or the rows of `asyncrl
    sft`."""

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease: ...

    def snapshot(self) -> dict[str, Any]: ...

    def commit(self, *, step: int) -> None: ...


class LeasePrefetch:
    """Leases batches at most one step ahead; at most one request at a time.

    Consumes: `lease` of the source. Waits for: rollout workers to fill the next batch. Unblocked by: the replay server.
    """

    def __init__(self, source: Source, *, rank: int, world: int, wait_s: float) -> None:
        self._source, self._rank, self._world, self._wait_s = source, rank, world, wait_s
        self._pending: tuple[int, Future[Lease]] | None = None

    def ask(self, step: int) -> None:
        """Start to lease `step`; returns at once."""
        if self._pending is not None:
            raise AssertionError(f"step {self._pending[0]} is still being fetched")
        self._pending = (step, in_background(f"lease-{step}", partial(self._lease, step)))

    def is_there(self, step: int, within_s: float) -> bool:
        """Whether the lease of `step` has arrived or failed within this time. Requests it if that was not done yet."""
        if self._pending is None:
            self.ask(step)
        assert self._pending is not None
        return bool(wait([self._pending[1]], timeout=within_s).done)

    def wait(self, step: int, asked: Callable[[], bool]) -> None:
        """Wait until the lease of `step` has arrived or failed, or until `asked` returns true."""
        while not asked() and not self.is_there(step, LOOK_S):
            pass

    def lost(self) -> NoProgress | None:
        """Why there will be no batch; None if it arrived, is still awaited, or was not requested."""
        if self._pending is None or not self._pending[1].done():
            return None
        error = self._pending[1].exception()
        return error if isinstance(error, NoProgress) else None

    def take(self, step: int) -> Lease:
        """The lease of `step`. Requests it if that was not done yet.

        Raises:
            NoProgress: no group and no token arrived for `wait_s`; the message names what the server waited for.
        """
        if self._pending is None:
            self.ask(step)
        assert self._pending is not None
        asked, future = self._pending
        if asked != step:
            raise AssertionError(f"step {asked} was requested, but step {step} is needed")
        # The replay server bounds this wait: it gives up when no group arrives for `wait_s`, its client when the server
        # is silent. A deadline for the whole batch would end runs whose batches just take long to fill.
        lease = future.result()
        self._pending = None
        return lease

    def _lease(self, step: int) -> Lease:
        with span("fetch the batch", "leases", step=step + 1) as fetched:
            lease = self._source.lease(step=step, rank=self._rank, world=self._world, wait_s=self._wait_s)
            fetched.also(groups=[group.group_id for group in lease.plan.groups])
        return lease
