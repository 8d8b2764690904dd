"""The learner's end of all transports: hands each version to a sender's thread, which reads it out of the live
parameters, and lets the optimizer wait until it has been read.

    publish(v) --> pending --> thread: sender.send(v) --open--> bucket after bucket <--gather-- the other ranks
    optimizer  --> wait() until v was sent once and nobody reads it

    ranks gather over gloo, or there is one    beside forward and backward; newcomers get v until the optimizer steps
    over nccl, or in another layout            to its end inside `publish`; newcomers get v in a meeting (`serve`)

`Gather.background` is the rule that says which.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Protocol

import torch

from asyncrl.background import in_background
from asyncrl.errors import WeightsError
from asyncrl.spans import span
from asyncrl.weights.base import PublishStats
from asyncrl.weights.canary import Canary
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.publishing.gather import PASS, TICK, Gather, manifest_of
from asyncrl.weights.publishing.version import Version
from asyncrl.weights.streams import SideStream

_GATHER_S = 60.0
"""Seconds that the ranks of a gather get, beyond the time that the first of them may wait for the sender."""
_TICK_S = 20.0
"""Seconds between two words to ranks that wait for the next pass; less than the timeout of their group."""


class Sender(Protocol):
    """Learner's end of one transport. All methods run on the publisher's thread, `stats` on any."""

    @property
    def behind(self) -> bool:
        """Whether somebody waits for the newest version, which was not open any more. Read on any thread."""
        ...

    def send(self, version: Version) -> None:
        """Send `version`, while it is open (`Version.open`), to all members that are present. Retries happen in
        here."""
        ...

    def idle(self, newest: Version | None) -> None:
        """Look after newcomers. Called every few milliseconds while there is nothing to send."""
        ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class WeightPublisher:
    """Implements `weights.base.Publisher`. `sender` is None on ranks other than 0, which only take part in the gather.

    Args:
        wire_dtype: floating-point tensors are cast to it before they are gathered.
        bucket_bytes: limit on the size of a bucket.
        wait_s: longest wait for the sender to have sent a version once.
        device: the learner's.
        idle_s: seconds between two checks for newcomers.
    """

    def __init__(
        self,
        sender: Sender | None,
        *,
        wire_dtype: torch.dtype,
        bucket_bytes: int,
        wait_s: float,
        device: torch.device | str = "cpu",
        idle_s: float = 0.02,
    ) -> None:
        self._sender = sender
        self._wire_dtype, self._bucket_bytes = wire_dtype, bucket_bytes
        self._wait_s, self._idle_s = wait_s, idle_s
        self._device = torch.device(device)
        self._stats = dict.fromkeys(("weights/gather_s", "weights/wait_s"), 0.0)
        self._waited_s = 0.0
        self._manifest: Manifest | None = None
        self._gather: Gather | None = None
        self._names: list[str] = []
        self._newest: Version | None = None
        """On rank 0."""
        self._following: Future[None] | None = None
        """On other ranks: their part in the newest version."""
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._pending: Version | None = None
        self._closing = False
        self._failure: Exception | None = None
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="weights-publisher", daemon=True)
        if sender is not None:
            self._thread.start()

    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]], canary: Canary | None = None
    ) -> PublishStats:
        self._stats["weights/wait_s"], self._waited_s = self._waited_s, 0.0
        waited = self._wait()
        manifest, gather = self._prepared(list(tensors))
        if self._sender is not None:
            version = Version(policy_version, manifest, self._tensors, gather, self._wait_s, canary)
            self._hand_over(version, gather)
        else:
            self._follow(policy_version, manifest, gather)
        return PublishStats(wait_previous_s=waited, nbytes=manifest.nbytes)

    def wait_sent(self) -> float:
        if self._newest is not None:
            return self._newest.wait(to_write=False)
        if self._following is not None and self._following.done():
            self._wait()
        return 0.0

    def wait(self) -> float:
        seconds = self._wait()
        self._waited_s += seconds
        return seconds

    @property
    def meets(self) -> bool:
        return self._gather is not None and not self._gather.background

    def serve(self) -> None:
        gather = self._gather
        if gather is None or gather.background:
            return  # the version is open, and the sender's thread looks after newcomers
        if self._newest is not None and self._sender is not None:
            behind = self._sender.behind
            gather.say(PASS if behind else TICK)
            if behind:
                self._hand_over(self._newest.again(), gather)
        elif gather.hear() == PASS:
            assert self._manifest is not None
            self._follow(-1, self._manifest, gather)

    def stats(self) -> dict[str, float]:
        return self._stats | (self._sender.stats() if self._sender is not None else {})

    def close(self, *, failed: bool = False) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._sender is not None:
            self._thread.join(self._wait_s)
            if self._newest is not None and not failed and not self._newest.failure:
                self._newest.give_up()
                self._newest.wait(to_write=True)  # the other ranks wait for the word
        elif self._following is not None and not failed:
            self._following.exception(timeout=self._wait_s)

    def _prepared(self, named: list[tuple[str, torch.Tensor]]) -> tuple[Manifest, Gather]:
        names = [name for name, _ in named]
        if self._manifest is None or self._gather is None:
            self._names = names
            self._manifest = manifest_of(named, self._wire_dtype, self._bucket_bytes)
            self._gather = Gather(named, self._wait_s + _GATHER_S)
        elif names != self._names:
            raise WeightsError("publish was called with other parameter names than the first time; the set is fixed")
        self._tensors = dict(named)
        return self._manifest, self._gather

    def _hand_over(self, version: Version, gather: Gather) -> None:
        """Give a version to the sender's thread; returns when the learner may go on."""
        with self._condition:
            if self._failure is not None:
                raise WeightsError(f"weights could not be sent: {self._failure}") from self._failure
            self._newest = self._pending = version
            self._condition.notify_all()
        if not gather.background:
            version.wait(to_write=True)

    def _follow(self, policy_version: int, manifest: Manifest, gather: Gather) -> None:
        """Take part in the gather of a version, as a rank other than 0."""
        if not gather.takes_part or not gather.shared:
            return
        following = partial(self._followed, policy_version, manifest, gather)
        if gather.background:
            self._following = in_background("weights-gather", following)
        else:
            following()

    def _followed(self, policy_version: int, manifest: Manifest, gather: Gather) -> None:
        try:
            gather.follow(manifest, self._tensors)
        except RuntimeError as error:
            raise WeightsError(
                f"version {policy_version} could not be gathered from the learner's ranks: {str(error).splitlines()[0]}"
            ) from error

    def _wait(self) -> float:
        """Wait until nothing reads the weights; see `Version.wait`."""
        if self._newest is not None:
            return self._newest.wait(to_write=True)
        if self._following is None:
            return 0.0
        started = time.perf_counter()
        try:
            self._following.result(self._wait_s + 2 * _GATHER_S)
        except FutureTimeout:
            raise WeightsError(
                f"rank 0 still sends the weights after {self._wait_s + 2 * _GATHER_S:.0f} s, or is silent. See its "
                "log, or raise weights.timeout_s."
            ) from None
        self._following = None
        return time.perf_counter() - started

    def _main(self) -> None:
        assert self._sender is not None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins on GPU 0, and would open a context there
            with SideStream(self._device).used():
                self._send_all(self._sender)
        except Exception as error:  # thread boundary: the learner's next publish raises it
            with self._condition:
                self._failure = error
                self._condition.notify_all()
        finally:
            if self._newest is not None:
                self._newest.give_up()
            self._sender.close()

    def _send_all(self, sender: Sender) -> None:
        current, ticked = None, 0.0
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._pending is not None or self._closing, self._idle_s)
                fresh, self._pending = self._pending, None
                if fresh is None and self._closing:
                    return
            if fresh is None:
                sender.idle(current)
                if current is not None and time.monotonic() >= ticked + _TICK_S:
                    ticked = time.monotonic()
                    current.tick()
                continue
            current, ticked = fresh, time.monotonic()
            with span("send the weights", version=fresh.policy_version):
                sender.send(fresh)
            fresh.give_up()  # no receiver was present
            self._stats["weights/gather_s"] = fresh.gather_s
