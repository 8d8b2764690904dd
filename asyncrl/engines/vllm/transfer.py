"""Our end of vLLM's weight transfer, in each of its worker processes: receive on a side thread, load at once.

    join, receive, read    on the side thread, while the engine generates; the bytes go to staging
    load                   between two steps of a paused engine: start -> update -> finish, from staging

Every worker is a separate rank of the weight group and stages Hugging Face tensors: whole ones, or the parts that
vLLM's loaders read of them in this process (`find_wanted`).
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.nccl import unpinned_nccl_env

from asyncrl.engines.vllm.plugin import OWNER_VARIABLE
from asyncrl.engines.vllm.reload import (
    abandon_reload,
    check_all_loaded,
    forget_packed_experts,
    repack_tied_heads,
    wanted_by,
)
from asyncrl.weights.boxes import whole
from asyncrl.weights.broadcast.staging import Seat, Staging
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.sliced import wanted_to_wire

_ORPHAN_LOOK_S = 1.0
_PATIENCE_S = 5.0
"""Seconds for the previous job to notice that its group was left."""


@dataclass
class JoinInfo(WeightTransferInitInfo):
    seat: dict[str, Any] = field(default_factory=dict)
    """From `asdict(Seat)`; its rank is that of this engine's first worker."""
    signal: list[Any] = field(default_factory=list)
    """See `SideJob`."""


@dataclass
class LoadInfo(WeightTransferUpdateInfo):
    """Empty: the weights to load are in staging already."""


class SideJob:
    """One piece of work on the side thread, and its result; it starts once the previous one has ended.

    Args:
        signal: name of a Unix socket and number of the job, which is sent there at the end (`receiver.Signal`).
        device: GPU of this process.
    """

    def __init__(
        self,
        work: Callable[[], list[str]],
        after: SideJob | None,
        signal: Sequence[Any] = (),
        device: torch.device | None = None,
    ) -> None:
        self._signal, self._device = signal, device
        self.prints: list[str] = []
        self.error = ""
        self._work, self._after, self._ended = work, after, False
        self._thread = threading.Thread(target=self._main, name="weights-side-job", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return self._ended or not self._thread.is_alive()

    def _main(self) -> None:
        try:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins on GPU 0, and would open a context there
            if self._after is not None:
                self._after._thread.join(_PATIENCE_S)
                if not self._after.done():
                    raise RuntimeError("the previous job has not ended")
                self._after = None
            self.prints = self._work()
        except Exception as error:  # thread boundary: the engine reads it with `poll`
            self.error = f"{type(error).__name__}: {error}"
        self._ended = True
        if self._signal:
            name, number = self._signal
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.setblocking(False)
                end.sendto(str(number).encode(), f"\0{name}")  # whoever is elsewhere polls


class TransferEngine(WeightTransferEngine[JoinInfo, LoadInfo]):
    """Weight transfer that the plugin registers with vLLM, which creates one per worker process by the name
    `plugin.BACKEND`."""

    init_info_cls = JoinInfo
    update_info_cls = LoadInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._cuda = device.type == "cuda"
        self._staging = Staging(device if self._cuda else None)
        self._file: Mapping[str, torch.Tensor] | None = None
        self._job: SideJob | None = None
        # On a server, which has no rollout worker, the owner is the parent process, which may be killed as well.
        owner = int(os.environ.get(OWNER_VARIABLE, os.getppid()))
        threading.Thread(target=_end_with_owner, args=(owner, os.getppid()), daemon=True).start()

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        parallel = self.parallel_config
        ours = parallel.data_parallel_index * parallel.world_size + parallel.rank
        seat = Seat(**init_info.seat)
        seat = replace(seat, rank=seat.rank + ours)
        self._job = SideJob(lambda: self._join(seat), self._job, init_info.signal, self.device)

    def find_wanted(self, tensors: list[list[Any]]) -> list[Any]:
        """See `plugin.WorkerExtension.asyncrl_wanted`. Also sets what is staged from now on, until the next call."""
        self._staging.keeps = None
        shapes = Manifest.from_wire([tensors]).shapes()
        wanted = wanted_by(self.model, shapes)
        self._staging.keeps = wanted
        return wanted_to_wire({name: boxes for name, boxes in wanted.items() if boxes != (whole(shapes[name].shape),)})

    def begin(self, kind: str, payload: dict[str, Any]) -> str:
        jobs: dict[str, Callable[[], list[str]]] = {
            "receive": lambda: self._receive(payload),
            "read": lambda: self._read(payload["path"]),
        }
        if kind not in jobs:
            return f"unknown job {kind!r}"
        self._job = SideJob(jobs[kind], self._job, payload.get("signal", ()), self.device)
        return ""

    def poll(self) -> list[Any]:
        job = self._job
        return [job.done(), job.prints, job.error] if job is not None else [True, [], "no job was begun"]

    def start_weight_update(self) -> None:
        if not self._cuda:
            forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        # Not the base class's method: its torch.accelerator.synchronize() raises on a torch without accelerators.
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: LoadInfo) -> None:
        tensors = self.staged()
        self.model.load_weights(list(tensors.items()))  # pyright: ignore[reportCallIssue]
        check_all_loaded(self.model)

    def staged(self) -> Mapping[str, torch.Tensor]:
        """The latest tensors, from the group or from a file."""
        return self._file if self._file is not None else self._staging.staged()

    def staged_bytes(self) -> int:
        """Bytes staged from the group; a file is gone after its load."""
        return self._staging.nbytes

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._file = None
        if not self._cuda:
            repack_tied_heads(self.model)

    def reset(self) -> None:
        """Recover from a failed load."""
        abandon_reload(self.model)
        self.reset_weight_update_target()

    def shutdown(self) -> None:
        self._staging.leave()

    def _join(self, seat: Seat) -> list[str]:
        # vLLM pins NCCL settings for its own groups; a group with the learner, which has other settings, would hang.
        with unpinned_nccl_env() if self._cuda else nullcontext():
            self._staging.join(seat)
        return []

    def _receive(self, event: dict[str, Any]) -> list[str]:
        self._file = None
        return self._staging.receive(event)

    def _read(self, path: str) -> list[str]:
        self._file = load_file(path)
        return []


def _end_with_owner(owner: int, parent: int) -> None:
    """waits for: the death of the rollout worker, however long the run; unblocked by: that.

    A killed worker closes nothing: its engine would hold memory, and the GPU, for ever. With tensor parallelism
    `parent` is vLLM's engine process, which does not notice it either.
    """
    while os.getppid() == parent and (parent == owner or _parent_of(parent) == owner):
        time.sleep(_ORPHAN_LOOK_S)
    if parent != owner and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os._exit(1)


def _parent_of(pid: int) -> int:
    """Process id of the parent; 0 if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.partition("PPid:")[2].split(maxsplit=1)[0])
