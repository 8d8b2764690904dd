"""Which adapters an engine holds, and who uses each. A sequence finishes under the one it began with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class HeldAdapter:
    """`number` grows with every adapter and is never used again, unlike a slot."""

    policy_version: int
    number: int
    users: int = 0

    @property
    def name(self) -> str:
        """Part of the prefix cache's keys: no two versions share one."""
        return f"policy@v{self.policy_version}"


class AdapterBook:
    """Args: slots: adapters that fit the engine."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held: list[HeldAdapter] = []
        self._numbers = 0
        self.newest: HeldAdapter | None = None

    @property
    def held(self) -> int:
        return len(self._held)

    def announce(self, policy_version: int) -> HeldAdapter:
        """An adapter about to be loaded; `commit` it once it is."""
        self._numbers += 1
        return HeldAdapter(policy_version=policy_version, number=self._numbers)

    def commit(self, adapter: HeldAdapter) -> None:
        """From now on new sequences begin with it."""
        self._held.append(adapter)
        self.newest = adapter

    def acquire(self) -> HeldAdapter | None:
        """The newest, for one sequence, which gives it back with `release`; None before the first."""
        if self.newest is not None:
            self.newest.users += 1
        return self.newest

    def release(self, adapter: HeldAdapter | None) -> None:
        if adapter is not None:
            adapter.users -= 1

    def evict(self) -> list[int]:
        """Forget the adapters that nobody uses any more, and return their numbers. The newest stays: should the one
        that is coming fail, it goes on."""
        gone = [adapter for adapter in self._held if adapter.users == 0 and adapter is not self.newest]
        self._held = [adapter for adapter in self._held if adapter not in gone]
        return [adapter.number for adapter in gone]

    def in_the_way(self) -> HeldAdapter | None:
        """The oldest adapter, when there is no slot for another one."""
        return self._held[0] if len(self._held) >= self._slots else None
