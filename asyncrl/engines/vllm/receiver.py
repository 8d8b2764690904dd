"""vLLM's workers as members of the weight group: each stages for itself, and this class only polls their progress."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncrl.errors import EngineDiedError, WeightsError
from asyncrl.weights.broadcast.staging import Seat
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.sliced import Wanted, wanted_from_wire

log = logging.getLogger(__name__)

CallWorkers = Callable[..., list[Any]]
"""`call(method, *arguments)` returns the answers of all workers."""
SHARED_MEMORY = "/dev/shm"
SEAT = [each.name for each in fields(Seat)]
"""Fields of the seat that a worker receives; a worker with another version of asyncrl would join a wrong group."""
POLL_S = 0.25
"""Seconds between two polls without a signal. Each is answered between two steps of the engine, and waits for those in
flight."""


class Signal:
    """Tells this process that side threads of workers on this machine have ended: a datagram of each to a socket, which
    has no file. A signal that is lost costs `POLL_S`."""

    def __init__(self) -> None:
        self._name, self._number, self._came = f"asyncrl-{secrets.token_hex(8)}", 0, 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self._name}")

    def next(self) -> list[Any]:
        """Return the address of the signal of a new job."""
        self._number, self._came = self._number + 1, 0
        return [self._name, self._number]

    def wait(self, workers: int, seconds: float) -> None:
        """Wait until so many workers have signalled that the job has ended, at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while self._came < workers and (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with contextlib.suppress(TimeoutError):
                self._came += self._socket.recv(32) == str(self._number).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedInWorkers:
    """Verified weights in the staging of the engine's own processes."""

    shapes: Mapping[str, torch.Tensor]
    """Name -> tensor without data, with the shape and dtype of the staged one."""


def agreed(prints: Iterable[str]) -> str:
    """Fingerprint of a bucket according to the processes that received it; "" if none did, "differ" if they
    disagree."""
    of = set(prints) - {""}
    return "differ" if len(of) > 1 else "".join(of)


class VllmReceiver:
    """Implements `weights.broadcast.staging.Receiver`.

    Args:
        tensors: the model's tensors by Hugging Face name, without data: the workers are asked which parts they keep,
            and get no more than those if the learner supports it. Without any they get whole tensors.
    """

    def __init__(self, call: CallWorkers, width: int, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self._call = call
        self._width = width
        self._tensors = tensors or {}
        self._wanted: list[Wanted] | None = None
        self._signal = Signal()
        self._seat: Seat | None = None
        self._shapes: Mapping[str, torch.Tensor] = {}

    @property
    def width(self) -> int:
        return self._width

    def wanted(self) -> Sequence[Wanted]:
        if self._wanted is None and self._tensors:
            rows = [
                [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
                for name, tensor in self._tensors.items()
            ]
            self._wanted = []
            for answer in self._call("asyncrl_wanted", rows):
                if isinstance(answer, str):
                    log.warning(
                        "weights: a worker of vLLM receives whole tensors, because its loaders do not show which "
                        "parts they need: %s",
                        answer,
                    )
                self._wanted.append({} if isinstance(answer, str) else wanted_from_wire(answer))
        return self._wanted or ()

    def join(self, seat: Seat) -> None:
        if self._seat is None or self._seat.manifest != seat.manifest:
            self._shapes = Manifest.from_wire(seat.manifest).shapes()
        self._seat = seat
        self._call("init_weight_transfer_engine", {"seat": asdict(seat), "signal": self._signal.next()})
        # The workers bound forming the group by timeout_s, and connecting to the store before it as well.
        self._wait(2 * seat.timeout_s + 10.0, "join the weight group")

    def receive(self, event: Mapping[str, Any]) -> list[str]:
        seat = self._seat
        assert seat is not None
        self._begin("receive", dict(event))
        # The group itself bounds every bucket.
        answers = self._wait((len(seat.manifest) + 1) * seat.timeout_s, "receive weights")
        return [agreed(prints) for prints in zip(*answers, strict=True)]

    def stage(self, tensors: Mapping[str, torch.Tensor], timeout_s: float) -> None:
        """Stage tensors of this process through memory that the machine's processes share.

        Raises:
            WeightsError: no space for them, or a worker could not read them.
        """
        place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="asyncrl-weights-", dir=place) as folder:
            path = Path(folder) / "staged.safetensors"
            try:
                save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path)
                self._begin("read", {"path": str(path)})
                self._wait(timeout_s, f"read {path}")
            except (OSError, RuntimeError) as error:
                if isinstance(error, EngineDiedError):
                    raise
                raise WeightsError(f"weights could not be staged through {path}: {error}") from error

    def staged(self) -> StagedInWorkers:
        return StagedInWorkers(shapes=self._shapes)

    def changed(self) -> bool:
        return False  # processes of one engine live and die together

    def leave(self) -> None:
        with contextlib.suppress(EngineDiedError):  # reported to the callers that wait for the engine
            self._call("asyncrl_leave")

    def _begin(self, kind: str, payload: dict[str, Any]) -> None:
        payload |= {"signal": self._signal.next()}
        refused = [answer for answer in self._call("asyncrl_begin", kind, payload) if answer]
        if refused:
            raise RuntimeError(refused[0])

    def _wait(self, timeout_s: float, what: str) -> list[list[str]]:
        """Return the fingerprints of every worker. waits for: their side threads; unblocked by: their signals or, of
        those on another machine, a poll that finds their end; or by the deadline.

        Raises:
            RuntimeError: a worker failed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._signal.wait(self._width, POLL_S)
            answers = self._call("asyncrl_poll")
            if all(done for done, _, _ in answers):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's workers did not {what} within {timeout_s:g} s")
        errors = [error for _, _, error in answers if error]
        if errors:
            raise RuntimeError(f"vLLM's workers did not {what}: {errors[0]}")
        return [prints for _, prints, _ in answers]
