"""The subscriber base of all transports: a thread receives a version, loads it into the engine and reports it to the
server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from asyncrl.errors import GenerationError, WeightsError
from asyncrl.spans import span
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import LoadWeights, SubscriberRendezvous
from asyncrl.weights.canary import Canary, Proof

log = logging.getLogger(__name__)
Done = TypeVar("Done")

_COUNTERS = (
    "loads", "nacks", "receive_s", "received_bytes", "load_s", "epoch", "epochs", "lost_publisher",
    "canary_checked", "canary_failed",
)  # fmt: skip


class Subscriber:
    """The worker's end of a transport, which overrides `_run`. Its thread runs until `close`, which sets `_closed`."""

    def __init__(
        self,
        rendezvous: SubscriberRendezvous,
        load: LoadWeights,
        name: str,
        proof: Proof | None = None,
        stall_s: Callable[[], float] | None = None,
    ) -> None:
        self._rendezvous = rendezvous
        self._load = load
        self._proof, self._stall_s = proof, stall_s
        self._proven = True
        self._proven_epoch = -1
        self._proven_before: tuple[int, Canary] | None = None
        self._policy_version = NO_VERSION
        self._fingerprint = ""
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self._stats = dict.fromkeys(_COUNTERS, 0.0)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="weights-load")
        self._thread = threading.Thread(target=self._main, name=f"weights-{name}", daemon=True)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def proven(self) -> bool:
        """Whether the engine's present output may leave the worker: false from the moment a version that has to be
        proven is loaded, until its canary has passed."""
        return self._proven

    def check(self) -> None:
        """Raise the error that stopped the thread, if one did."""
        if self._failure is not None:
            raise self._failure

    def stats(self) -> dict[str, float]:
        return {f"weights/{key}": value for key, value in self._stats.items()}

    def close(self) -> None:
        self._closed.set()
        self._thread.join(10.0)
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        raise NotImplementedError

    def _main(self) -> None:
        try:
            self._run()
        except Exception as error:  # thread boundary: `check` raises it in the worker
            if not self._closed.is_set():
                log.error("weights subscriber stopped: %s", error)
                self._failure = error

    def _serve(
        self,
        policy_version: int,
        fingerprint: str,
        tensors: Any,
        beat: Callable[[], None],
        *,
        canary: Mapping[str, Any] | None = None,
        epoch: int = 0,
    ) -> dict[str, float]:
        """Load verified tensors into the engine, verify that it serves them, and report it to the server.

        Args:
            beat: called repeatedly while the engine loads, so that the publisher does not consider this worker dead.
            canary: as returned by `Canary.to_wire`.
            epoch: of the group that sent the version; the first version of each epoch is verified.

        Returns:
            Metrics for the learner: `load_s`, `stall_s`, `canary_max`, `canary_mean`.

        Raises:
            WeightsError: the engine refused them and still serves its previous version; or it disagrees with the
                learner, and this worker must not serve any more.
        """
        known = (policy_version, fingerprint) == (self._policy_version, self._fingerprint)
        due = canary is not None and self._proof is not None and self._proof_due(policy_version, epoch)
        if known and not due:
            return {}
        self._proven = not due
        report: dict[str, float] = {}
        if not known:
            started, halted = time.perf_counter(), self._halted_s()
            try:
                with span("load", version=policy_version):
                    self._wait_for(self._loader.submit(self._load, policy_version, tensors), beat)
            except WeightsError:
                self._proven = True  # the previous version is still served
                raise
            report["load_s"] = time.perf_counter() - started
            report["stall_s"] = self._halted_s() - halted
            self._stats["load_s"] += report["load_s"]
            self._stats["loads"] += 1
        if due and canary is not None and self._proof is not None:
            with span("prove", version=policy_version):
                report |= self._prove(self._proof, policy_version, Canary.from_wire(canary), beat)
            self._proven, self._proven_epoch = True, epoch
        self._policy_version, self._fingerprint = policy_version, fingerprint
        if not known:
            self._rendezvous.served(policy_version, fingerprint)
        return report

    def _halted_s(self) -> float:
        return self._stall_s() if self._stall_s is not None else 0.0

    def _proof_due(self, policy_version: int, epoch: int) -> bool:
        if self._policy_version == NO_VERSION or epoch != self._proven_epoch:
            return True
        every = self._proof.verify_every if self._proof is not None else 0
        return every > 0 and policy_version % every == 0

    def _prove(self, proof: Proof, policy_version: int, canary: Canary, beat: Callable[[], None]) -> dict[str, float]:
        self._stats["canary_checked"] += 1
        try:
            proving = self._loader.submit(proof.prove, policy_version, canary, self._proven_before)
            found = self._wait_for(proving, beat)
        except (WeightsError, GenerationError) as error:
            self._stats["canary_failed"] += 1
            log.error("weights: the canary failed: %s", error)
            raise WeightsError(f"version {policy_version} is not served: {error}") from error
        self._proven_before = policy_version, canary
        return {"canary_max": found.max, "canary_mean": found.mean}

    def _wait_for(self, work: Future[Done], beat: Callable[[], None]) -> Done:
        """Wait for the engine, whose own waits are bounded."""
        while True:
            try:
                return work.result(timeout=0.5)
            except FutureTimeout:
                if work.done():
                    raise
                if self._closed.is_set():
                    raise WeightsError("the subscriber was closed while the engine was loading") from None
                beat()
