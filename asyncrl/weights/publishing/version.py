"""One version of the weights, read out of the learner's live parameters as often as it has to be sent.

    sender's thread    with version.open() as buckets: buckets.take(0), take(1), ...      any number of passes
    learner            publish(v), forward, backward, version.wait(to_write=True), optimizer step

Weights change only in the optimizer's step. After it the version cannot be read any more: who missed it gets the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from asyncrl.errors import WeightsError, WeightsGoneError
from asyncrl.weights.canary import Canary
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.publishing.gather import END, PASS, TICK, BucketContents, BucketInTransfer, Gather


class Version:
    """What rank 0's sender sends.

    Args:
        tensors: live parameters by name.
        wait_s: longest wait for the sender.
        canary: sent with the version.
    """

    def __init__(
        self,
        policy_version: int,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
        gather: Gather,
        wait_s: float,
        canary: Canary | None = None,
    ) -> None:
        self.policy_version, self.manifest, self.canary = policy_version, manifest, canary
        self._tensors, self._gather, self._wait_s = tensors, gather, wait_s
        self._condition = threading.Condition()
        self._readers = 0
        self._due, self._writing = True, False
        self._failure = ""
        self.gather_s = 0.0
        """Seconds that the last pass waited for other ranks."""
        self.device = next((t.device for t in tensors.values() if t.device.type == "cuda"), torch.device("cpu"))
        self._ready: torch.cuda.Event | None = None
        if self.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self.device))

    @property
    def gone(self) -> bool:
        """Whether it is too late to start reading: the learner writes, or waits to write."""
        return self._writing and not self._due

    @property
    def failure(self) -> str:
        """Why it can never be sent: a learner rank is gone. Empty if it can."""
        return self._failure

    @contextmanager
    def open(self) -> Iterator[Buckets]:
        """Hold the weights unchanged for one pass over the buckets. A body that ends without an error has sent them,
        and the learner waits for no more.

        Raises:
            WeightsGoneError: the weights have changed, or are about to.
            WeightsError: a learner rank is gone or silent.
        """
        with self._condition:
            if self.gone:
                raise WeightsGoneError(f"the learner's weights are no longer those of version {self.policy_version}")
            self._readers += 1
        sent = False
        try:
            stream = None
            if self._ready is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(self._ready)
            with self._blamed():
                self._gather.say(PASS)
            buckets = Buckets(self)
            try:
                yield buckets
                sent = True
            finally:
                if not self._failure:
                    buckets.drain()  # the other ranks gather every bucket of a pass
                if stream is not None:
                    stream.synchronize()  # what was enqueued here reads the weights
            self.gather_s = buckets.waited_s
        finally:
            with self._condition:
                self._readers -= 1
                self._due = self._due and not sent
                self._condition.notify_all()

    def give_up(self) -> None:
        """No receiver is present, or all have received it: the learner need not wait."""
        with self._condition:
            self._due = False
            self._condition.notify_all()

    def again(self) -> Version:
        """The same version, as long as the weights have not changed, to be sent once more."""
        return Version(self.policy_version, self.manifest, self._tensors, self._gather, self._wait_s, self.canary)

    @property
    def gathered_on(self) -> torch.device | None:
        """Device of the gathered buckets; None if live parameters are sent."""
        return self._gather.device

    def tick(self) -> None:
        """Called every few seconds while it is not read: keeps the other ranks from giving up on this one."""
        with self._condition, self._blamed():
            if not self._writing and not self._failure:
                self._gather.say(TICK)

    def wait(self, *, to_write: bool) -> float:
        """Wait until the version was sent, or given up, and nobody reads it; returns the seconds. With `to_write`
        nobody can start to read from then on.

        Raises:
            WeightsError: it is still being sent after `wait_s`, or can never be.
        """
        started = time.perf_counter()
        with self._condition:
            already, self._writing = self._writing, self._writing or to_write
            if not self._condition.wait_for(lambda: not self._due and not self._readers, self._wait_s):
                raise WeightsError(
                    f"version {self.policy_version} is still being sent out of the learner's weights after "
                    f"{self._wait_s:.0f} s. A worker takes too long (see its log; weights.timeout_s may be raised), or "
                    "no group forms with the workers: then warnings above say why"
                )
        if self._failure:
            raise WeightsError(self._failure)
        if to_write and not already:
            with self._blamed():
                self._gather.say(END)
        return time.perf_counter() - started

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Turn an error of a collective into one that names the learner's ranks, and give the version up."""
        try:
            yield
        except RuntimeError as error:
            self._failure = (
                f"version {self.policy_version} could not be gathered from the learner's ranks: "
                f"{str(error).splitlines()[0]}"
            )
            self.give_up()
            raise WeightsError(self._failure) from error


class Buckets:
    """One pass over the buckets of a version, in order. The next one is gathered while one is in use."""

    def __init__(self, version: Version) -> None:
        self._version = version
        self._begun = 0
        self._coming: BucketInTransfer | None = None
        self._index, self._contents = -1, BucketContents(tensors={})
        self.waited_s = 0.0
        """Seconds that this pass waited for other ranks."""
        self._begin_next()

    def take(self, index: int) -> BucketContents:
        """Return bucket `index`, which is not before the last one that was taken. It is valid until the next one but
        one is taken. Raises WeightsError: a learner rank is gone or silent."""
        started = time.perf_counter()
        while self._index < index:
            assert self._coming is not None
            with self._version._blamed():
                self._contents = self._coming.finish()
                self._coming, self._index = None, self._index + 1
                self._begin_next()
        self.waited_s += time.perf_counter() - started
        return self._contents

    def drain(self) -> None:
        """Gather what is left, and drop it."""
        self._contents = BucketContents(tensors={})
        if self._version._gather.shared:
            self.take(len(self._version.manifest.buckets) - 1)
        self._contents, self._coming = BucketContents(tensors={}), None

    def _begin_next(self) -> None:
        buckets = self._version.manifest.buckets
        if self._begun < len(buckets):
            with self._version._blamed():
                self._coming = self._version._gather.begin(buckets[self._begun], self._version._tensors)
            self._begun += 1
