"""A replay core with one worker and a learner, whose calls the test makes itself."""

from __future__ import annotations

from asyncrl.replay.core.core import ReplayCore
from asyncrl.types import NO_VERSION, StepPlan
from tests.replay.helpers import Clock, header, settings


class Play:
    """A replay core with one worker `w` (incarnation `a`) and a learner, whose calls the test makes itself."""

    def __init__(self, **changes) -> None:
        core_options = {name: changes.pop(name) for name in ("max_bytes", "seed", "journal") if name in changes}
        self.clock = Clock()
        self.core = ReplayCore(settings(**changes), self.clock, **core_options)
        self.core.hello("w", "a")
        self.version = self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_version
        self.core.publish(policy_version=0, parent=NO_VERSION)
        self.load()
        self.step = 0

    def load(self, version: int | None = None) -> None:
        self.core.served("w", "a", self.version if version is None else version, "f")

    def acquire(self, slots: int = 16):
        return list(self.core.acquire("w", "a", slots).assignments)

    def insert(self, order, *runs: tuple[int, int], payload=b"p", nbytes: int = 10) -> str:
        return self.core.insert("w", "a", header(order, *(runs or ((self.version, 4),)), nbytes=nbytes), payload).status

    def leased(self, step: int) -> StepPlan:
        """Return the batch of a step, which must be sealed by now."""
        plan = self.core.lease(step)
        assert plan is not None
        return plan

    def train(self):
        plan = self.leased(self.step)
        reply = self.core.trained(step=self.step, policy_version=self.version + 1)
        self.step += 1
        self.version += 1
        return plan, reply

    def whole_step(self, slots: int = 16) -> None:
        """Run one step: serve the weights, insert groups and train them."""
        self.load()
        for order in self.acquire(slots):
            self.insert(order)
        self.train()
