"""Keeps one version of the weights in the engine for as long as an evaluation chunk runs.

The engine pins single requests only: weights that arrived between two rows of a chunk would split it over versions.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from asyncrl.errors import NoProgress, WeightsError
from asyncrl.weights.base import LoadWeights

POLL_S = 0.002


class VersionHold:
    """Stands between the weight subscriber and the engine's `load_weights`. Loads and chunks take turns, so that
    neither can starve the other.

    Args:
        load: the engine's.
        timeout_s: longest either side waits for the other.
    """

    def __init__(self, load: LoadWeights, timeout_s: float) -> None:
        self._load = load
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._chunks: list[str] = []
        self._loads = 0

    def load_weights(self, policy_version: int, tensors: Mapping[str, Any]) -> None:
        """As the engine's, after the running evaluation chunks.

        Raises:
            WeightsError: they take too long. The subscriber tells the worker, which ends with it, and the chunks with
                the worker.
        """
        with self._changed:
            self._loads += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._chunks, self._timeout_s):
                    raise WeightsError(
                        f"version {policy_version} was not loaded: it waited {self._timeout_s:g} s "
                        f"(replay.wait_timeout_s) for {', '.join(self._chunks)} to end. Lower eval.chunk or "
                        "rollout.max_new_tokens"
                    )
            self._load(policy_version, tensors)
        finally:
            with self._changed:
                self._loads -= 1

    @asynccontextmanager
    async def held(self, what: str) -> AsyncIterator[None]:
        """No weights are loaded inside. waits for: a load that came first; unblocked by: its end, or the deadline.

        Args:
            what: is done inside, for the message.

        Raises:
            NoProgress: the load took longer than `timeout_s`. What is done inside has no deadline while no load waits:
                the worker ends one whose engine gives no token, and rewards have their own.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._enter(what):
            if time.monotonic() > deadline:
                raise NoProgress(f"{what} waited {self._timeout_s:g} s for weights being loaded")
            await asyncio.sleep(POLL_S)
        try:
            yield
        finally:
            with self._changed:
                self._chunks.remove(what)
                self._changed.notify_all()

    def _enter(self, what: str) -> bool:
        with self._changed:
            if self._loads:
                return False
            self._chunks.append(what)
            return True
