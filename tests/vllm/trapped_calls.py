"""A replacement for `WorkerExtension` that the chaos run puts into vLLM's engine process: it has the same calls, and a
trap that kills or stops that process in one of its phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from asyncrl.engines.vllm import transfer as vllm_transfer
from asyncrl.engines.vllm.plugin import WorkerExtension
from asyncrl.weights.broadcast import staging
from asyncrl.weights.broadcast.group import WeightGroup
from asyncrl.weights.fingerprint import Fingerprint
from tests.weights.trap import Trap


class CoreTrap(Trap):
    def set(self) -> None:
        """Set the trap at the start of each phase. May be called once in a process."""
        broadcast, receive = WeightGroup.broadcast, staging.Staging.receive
        join, hashed = vllm_transfer.TransferEngine._join, Fingerprint.update
        whole = vllm_transfer.check_all_loaded

        def trapped_broadcast(group: WeightGroup, buffer: torch.Tensor) -> Any:
            self.at(f"bucket {self.bucket}")
            self.bucket += 1
            return broadcast(group, buffer)

        def trapped_receive(receiver: staging.Staging, event: Any) -> list[str]:
            self.bucket = 0
            return receive(receiver, event)

        def trapped_join(engine: Any, seat: Any) -> list[str]:
            self.at("join")
            return join(engine, seat)

        def trapped_hash(fingerprint: Fingerprint, piece: torch.Tensor) -> None:
            self.at("fingerprint")
            hashed(fingerprint, piece)

        def trapped_whole(model: torch.nn.Module) -> None:
            self.at("mid load")  # every layer is loaded, and vLLM's post-processing has not run yet
            whole(model)

        WeightGroup.broadcast, staging.Staging.receive = trapped_broadcast, trapped_receive  # pyright: ignore[reportAttributeAccessIssue]
        vllm_transfer.TransferEngine._join, Fingerprint.update = trapped_join, trapped_hash  # pyright: ignore[reportAttributeAccessIssue]
        vllm_transfer.check_all_loaded = trapped_whole


class TrappedCalls(WorkerExtension):
    asyncrl_trap: CoreTrap | None = None

    def asyncrl_arm(self, action: str, phase: str, fired: str) -> None:
        self.asyncrl_trap = CoreTrap()
        self.asyncrl_trap.arm(action, phase, Path(fired).touch)
        self.asyncrl_trap.set()

    def asyncrl_load(self) -> str:
        if self.asyncrl_trap is not None:
            self.asyncrl_trap.at("before load")
        answer = super().asyncrl_load()
        if self.asyncrl_trap is not None:
            self.asyncrl_trap.at("after load")
        return answer
