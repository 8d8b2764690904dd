"""An epoch while its groups form: all members hear when that has become impossible, rather than wait for each other.

epoch/over   the first reason: [seat of a member that has no connection, or 0, why]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgpack
import torch.distributed as dist

from asyncrl.weights.broadcast.protocol import fetch, wait_key

LOOK_S = 0.5
"""Seconds between two looks, while a member waits for others."""
_OVER = "over"


class ApartError(RuntimeError):
    """A member cannot connect to others, and will fail to again."""

    def __init__(self, seat: int, why: str) -> None:
        super().__init__(why)
        self.seat = seat


class Forming:
    """One member's view.

    Args:
        store: of all groups of the epoch.
        watch: of the publisher: says that a member has died, or nothing.
    """

    def __init__(self, store: dist.Store, watch: Callable[[], str] | None = None) -> None:
        self._store, self._watch = store, watch

    def look(self) -> None:
        """Raise the reason why this epoch does not form, if there is one: ApartError if a member has no connection,
        else RuntimeError."""
        self._look_at_the_reason()
        if self._watch is not None and (why := self._watch()):
            self.give_up(why)  # before this end is closed: else whoever is connected to it says first that it has left
            raise RuntimeError(why)

    def _look_at_the_reason(self) -> None:
        if self._store.check([_OVER]):
            seat, why = fetch(self._store, _OVER)
            raise ApartError(seat, why) if seat else RuntimeError(why)

    def give_up(self, why: str, seat: int = 0) -> None:
        """Tell all others, who end their waits; the first reason counts, and is raised if it is another's."""
        self._look_at_the_reason()
        self._store.compare_set(_OVER, "", msgpack.packb([seat, why]))  # pyright: ignore[reportArgumentType]

    def wait_key(self, store: dist.Store, key: str, deadline: float, whom: str) -> None:
        """Wait for `key`. Raises RuntimeError: it does not come by `deadline`, or the epoch does not form."""
        while not wait_key(store, key, min(LOOK_S, max(deadline - time.monotonic(), 0.0))):
            self.look()
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{whom} did not come in time")
