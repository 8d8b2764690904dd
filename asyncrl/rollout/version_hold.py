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
        self._chunks = 0
        self._loads = 0

    def load_weights(self, policy_version: int, tensors: Mapping[str, Any]) -> None:
        """As the engine's, after the running evaluation chunks. Raises WeightsError when they take too long."""
        with self._changed:
            self._loads += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._chunks == 0, self._timeout_s):
                    raise WeightsError(
                        f"version {policy_version} was not loaded: an evaluation chunk ran longer than "
                        f"{self._timeout_s:g} s. Lower eval.chunk or rollout.max_new_tokens"
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
            NoProgress: the load took longer than `timeout_s`, or what is done inside did, for which loads wait no
                longer either.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._enter():
            if time.monotonic() > deadline:
                raise NoProgress(f"{what} waited {self._timeout_s:g} s for weights being loaded")
            await asyncio.sleep(POLL_S)
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise NoProgress(
                f"{what} were not finished within {self._timeout_s:g} s (replay.wait_timeout_s). Waited for the engine "
                "and the rewards of this worker. Lower eval.chunk or rollout.max_new_tokens"
            ) from error
        finally:
            with self._changed:
                self._chunks -= 1
                self._changed.notify_all()

    def _enter(self) -> bool:
        with self._changed:
            if self._loads:
                return False
            self._chunks += 1
            return True
