"""What the chaos run puts into vLLM's engine process in the place of `StagingCalls`: the same calls, and a trap that
kills or stops that process in a phase of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from asyncrl.engines import vllm_transfer
from asyncrl.engines.vllm_worker import StagingCalls
from asyncrl.weights import staging
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.group import WeightGroup

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class CoreTrap:
    def __init__(self, action: str, phase: str, fired: str) -> None:
        self._signal, self._phase, self._fired = SIGNALS[action], phase, Path(fired)
        self._bucket = 0

    def at(self, phase: str) -> None:
        if phase == self._phase and not self._fired.exists():
            self._fired.touch()
            os.kill(os.getpid(), self._signal)

    def set(self) -> None:
        """In the places where the phases begin; may be called once in a process."""
        broadcast, receive = WeightGroup.broadcast, staging.Staging.receive
        join, hashed = vllm_transfer.StagedWeights._join, Fingerprint.update
        whole = vllm_transfer.check_all_loaded

        def trapped_broadcast(group: WeightGroup, buffer: torch.Tensor) -> Any:
            self.at(f"bucket {self._bucket}")
            self._bucket += 1
            return broadcast(group, buffer)

        def trapped_receive(receiver: staging.Staging, event: Any) -> list[str]:
            self._bucket = 0
            return receive(receiver, event)

        def trapped_join(engine: Any, seat: Any) -> list[str]:
            self.at("join")
            return join(engine, seat)

        def trapped_hash(fingerprint: Fingerprint, piece: torch.Tensor) -> None:
            self.at("fingerprint")
            hashed(fingerprint, piece)

        def trapped_whole(model: torch.nn.Module) -> None:
            self.at("mid load")  # every layer is filled, and none of vLLM's own repairs was made yet
            whole(model)

        WeightGroup.broadcast, staging.Staging.receive = trapped_broadcast, trapped_receive
        vllm_transfer.StagedWeights._join, Fingerprint.update = trapped_join, trapped_hash
        vllm_transfer.check_all_loaded = trapped_whole


class TrappedCalls(StagingCalls):
    asyncrl_trap: CoreTrap | None = None

    def asyncrl_arm(self, action: str, phase: str, fired: str) -> None:
        self.asyncrl_trap = CoreTrap(action, phase, fired)
        self.asyncrl_trap.set()

    def asyncrl_load(self) -> str:
        if self.asyncrl_trap is not None:
            self.asyncrl_trap.at("before load")
        answer = super().asyncrl_load()
        if self.asyncrl_trap is not None:
            self.asyncrl_trap.at("after load")
        return answer
