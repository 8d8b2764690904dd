"""The subscriber every transport shares: a thread that receives, an engine that loads, a server that is told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import torch

from asyncrl.errors import WeightsError
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import LoadWeights, SubscriberRendezvous

log = logging.getLogger(__name__)


class SubscriberThread:
    """Implements `weights.base.Subscriber`; a transport overrides `_run`, which ends when `_closed` is set."""

    def __init__(self, rendezvous: SubscriberRendezvous, load: LoadWeights, name: str) -> None:
        self._rendezvous = rendezvous
        self._load = load
        self._policy_version = NO_VERSION
        self._fingerprint = ""
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self._stats = dict.fromkeys(("loads", "nacks", "receive_s", "load_s", "epoch", "epochs", "lost_publisher"), 0.0)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="weights-load")
        self._thread = threading.Thread(target=self._main, name=f"weights-{name}", daemon=True)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def check(self) -> None:
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
        except Exception as error:  # thread boundary: the worker gets it from `check`
            if not self._closed.is_set():
                log.error("weights subscriber stopped: %s", error)
                self._failure = error

    def _serve(
        self,
        policy_version: int,
        fingerprint: str,
        tensors: Mapping[str, torch.Tensor],
        beat: Callable[[], None],
    ) -> None:
        """Load verified tensors into the engine and tell the server. `beat` is called while the engine takes its time
        (it finishes evaluations first), so that the publisher does not take this worker for dead.

        Raises:
            WeightsError: the engine refused them; it still serves what it served.
        """
        if (policy_version, fingerprint) == (self._policy_version, self._fingerprint):
            return
        started = time.perf_counter()
        loading: Future[None] = self._loader.submit(self._load, policy_version, tensors)
        # Waits for the engine, which bounds its own wait for pinned requests.
        while True:
            try:
                loading.result(timeout=0.5)
                break
            except FutureTimeout:
                if loading.done():
                    raise
                if self._closed.is_set():
                    raise WeightsError("the subscriber was closed while the engine was loading") from None
                beat()
        self._policy_version, self._fingerprint = policy_version, fingerprint
        self._stats["load_s"] += time.perf_counter() - started
        self._stats["loads"] += 1
        self._rendezvous.served(policy_version, fingerprint)
