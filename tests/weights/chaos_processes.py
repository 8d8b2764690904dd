"""The processes of the chaos run: a learner and workers, which a trap kills or stops in a given phase."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.broadcast import door, protocol, staging
from asyncrl.weights.broadcast import publisher as broadcast_publisher
from asyncrl.weights.broadcast import subscriber as broadcast_subscriber
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.canary import Canary, Proof, random_probes
from asyncrl.weights.files.sender import FilesSender
from asyncrl.weights.files.shelf import UrlShelf
from asyncrl.weights.files.subscriber import FilesSubscriber
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.publishing.publisher import Sender, WeightPublisher
from tests.weights.board import WorkerRendezvous, end_with_tests
from tests.weights.trap import Injection, Trap

TIMEOUT_S = 3.0
PAUSE_S = 0.05
LAYERS = 6
PROBES = random_probes(1000, seed=0)
_OF_A_JOIN = ("hello", "accept", "invite", "go")


def weights(version: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return tensors that fill several buckets. Column 0 holds the version and all other columns the layer: between
    versions one number of each row changes."""
    tensors = {f"layers.{i}.w": torch.full((40, 25), float(i), device=device) for i in range(LAYERS)}
    for tensor in tensors.values():
        tensor[:, 0] = float(version)
    return tensors


def versions_in(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {float(value) for tensor in tensors.values() for value in tensor[:, 0].unique()}


def score(tensors: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """Return a log-prob per probe token that is one number of one tensor, so that any row of an old version shows."""
    return [
        np.array([-float(tensors[f"layers.{i % LAYERS}.w"][i % 40, 0]) for i in ids[1:].tolist()], np.float32)
        for ids in PROBES
    ]


class Engine:
    """A table of tensors, replaced under a lock, and a thread that reads it all the time as decode steps would."""

    def __init__(self, board: Any, worker: str, trap: Trap, device: str) -> None:
        self._board, self._worker, self._trap, self._device = board, worker, trap, device
        self._tensors: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._look, daemon=True).start()

    def load(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        self._trap.bucket = 0
        self._trap.at("before load")
        with self._lock:
            for i, (name, tensor) in enumerate(tensors.items()):
                if i == LAYERS // 2:
                    self._trap.at("mid load")
                self._tensors[name] = tensor.to(self._device, copy=True)
        self._trap.at("after load")

    def score(self, sequences: Any) -> list[np.ndarray]:
        with self._lock:
            return score(self._tensors)

    def _look(self) -> None:
        while True:
            with self._lock:
                served = versions_in(self._tensors)
            if len(served) > 1:
                self._board.note("mixed", (self._worker, sorted(served)))
            time.sleep(0.01)


class ArmedWhen:
    """Arms a trap once: at once for a phase of joining, otherwise when `update` says that updates succeed."""

    def __init__(self, board: Any, trap: Trap, injection: Injection | None) -> None:
        self._board, self._trap, self._injection = board, trap, injection
        self.update(injection is not None and injection.phase.split()[-1] in _OF_A_JOIN)

    def update(self, due: bool) -> None:
        injection = self._injection
        if due and injection is not None:
            self._injection = None
            self._trap.arm(injection.action, injection.phase, lambda: self._board.note("fired", time.time()))


def worker_process(
    board: Any, worker: str, incarnation: str, injection: Injection | None, device: str = "cpu", files: bool = False
) -> None:
    end_with_tests()
    torch.set_num_threads(1)
    torch.zeros(1, device=device)  # initialize CUDA before anything waits for this process
    trap = Trap()
    armed = ArmedWhen(board, trap, injection)
    broadcast_subscriber.post = protocol.post = trap.post  # `protocol.answer` posts the subscriber's answer
    staging.WeightGroup = trap.group()
    hashed = Fingerprint.update

    def update(fingerprint: Fingerprint, piece: torch.Tensor) -> None:
        trap.at("fingerprint")
        hashed(fingerprint, piece)

    Fingerprint.update = update  # pyright: ignore[reportAttributeAccessIssue]
    engine = Engine(board, worker, trap, device)
    board.join(worker, incarnation)
    proof = Proof(score=engine.score, engine_dtype="float32", verify_every=1)
    if files:
        trap.blocks()
        subscriber = FilesSubscriber(WorkerRendezvous(board, worker), engine.load, proof, timeout_s=TIMEOUT_S)
    else:
        subscriber = BroadcastSubscriber(
            WorkerRendezvous(board, worker),
            engine.load,
            worker=worker,
            incarnation=incarnation,
            timeout_s=TIMEOUT_S,
            receiver=staging.Staging(None if device == "cpu" else torch.device(device)),
            proof=proof,
        )
    while not board.notes(f"stop/{worker}"):
        try:
            subscriber.check()
        except Exception as error:
            board.note("failed", f"{worker}: {error}")
            raise
        armed.update(subscriber.stats()["weights/loads"] >= 2)
        time.sleep(0.02)
    subscriber.close()


def sender_of(board: Any, delta: str, backend: str, trap: Trap, folder: str) -> Sender:
    if folder:
        trap.files()
        shelf = UrlShelf(f"file://{folder}/there", Path(folder))
        return FilesSender(board, Path(folder), delta=delta, shelf=shelf)
    broadcast_publisher.post = door.post = trap.post
    broadcast_publisher.WeightGroup = trap.group()
    return BroadcastSender(board, Link(host="127.0.0.1", timeout_s=TIMEOUT_S, backend=backend), poll_members_s=0.2)


def learner_process(
    board: Any,
    first: int,
    injection: Injection | None,
    delta: str,
    backend: str,
    device: str = "cpu",
    folder: str = "",
) -> None:
    """Run a learner.

    Args:
        folder: if given, put the versions at a URL below it.
    """
    end_with_tests()
    torch.set_num_threads(1)
    trap = Trap()
    armed = ArmedWhen(board, trap, injection)
    publisher = WeightPublisher(
        sender_of(board, delta, backend, trap, folder),
        wire_dtype=torch.float32,
        bucket_bytes=1 << 12,
        wait_s=60 * TIMEOUT_S,
        idle_s=0.005,
        device=device,
    )
    version, own = first, weights(first, device)
    while not board.notes("stop/learner"):
        tensors = weights(version, device)
        publisher.wait()
        tensors = {name: own[name].copy_(tensor) for name, tensor in tensors.items()}  # over the one before
        canary = Canary(sequences=PROBES, logprobs=tuple(score(tensors)), learner_dtype="float32", wire_dtype="float32")
        try:
            publisher.publish(version, tensors.items(), canary)
        except WeightsError as error:
            board.note("ended/0", str(error))
            raise
        board.note("published", version)
        armed.update(version >= first + 3)
        version += 1
        time.sleep(PAUSE_S)
    publisher.close()
