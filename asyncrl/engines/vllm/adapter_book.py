"""Tracks which adapters an engine holds, and who uses each. A sequence finishes under the adapter it started with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class HeldAdapter:
    """An adapter in the engine. `number` grows with every adapter and is never reused, unlike a slot."""

    policy_version: int
    number: int
    users: int = 0

    @property
    def name(self) -> str:
        """Part of the prefix cache's keys, so no two versions share one."""
        return f"policy@v{self.policy_version}"


class AdapterBook:
    """Args: slots: number of adapters that the engine holds."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held: list[HeldAdapter] = []
        self._numbers = 0
        self.newest: HeldAdapter | None = None

    @property
    def held(self) -> int:
        return len(self._held)

    def announce(self, policy_version: int) -> HeldAdapter:
        """Return an adapter that is about to be loaded; `commit` it once it is."""
        self._numbers += 1
        return HeldAdapter(policy_version=policy_version, number=self._numbers)

    def commit(self, adapter: HeldAdapter) -> None:
        """Make it the adapter that new sequences use."""
        self._held.append(adapter)
        self.newest = adapter

    def acquire(self) -> HeldAdapter | None:
        """Return the newest adapter for one sequence, to be returned with `release`; None before the first."""
        if self.newest is not None:
            self.newest.users += 1
        return self.newest

    def release(self, adapter: HeldAdapter | None) -> None:
        if adapter is not None:
            adapter.users -= 1

    def evict(self) -> list[int]:
        """Forget the adapters that are no longer used, and return their numbers. The newest stays in use, in case
        loading the next one fails."""
        gone = [adapter for adapter in self._held if adapter.users == 0 and adapter is not self.newest]
        self._held = [adapter for adapter in self._held if adapter not in gone]
        return [adapter.number for adapter in gone]

    def in_the_way(self) -> HeldAdapter | None:
        """The oldest adapter, if there is no slot for another one; otherwise None."""
        return self._held[0] if len(self._held) >= self._slots else None
