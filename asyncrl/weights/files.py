"""Files transport, both ends: safetensors in a directory that learner and workers share.

The learner writes `v<version>.safetensors` under a temporary name and renames it; the board then names the newest.
A reader takes a file only after its fingerprint, recomputed from the bytes read, is the one on the board.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrl.errors import WeightsError
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import LoadWeights, PublisherRendezvous, SubscriberRendezvous
from asyncrl.weights.canary import Proof
from asyncrl.weights.fingerprint import bucket_fingerprint, chain
from asyncrl.weights.snapshot import Snapshot
from asyncrl.weights.subscriber import SubscriberThread

log = logging.getLogger(__name__)


class FilesSender:
    """Implements `snapshot.Sender`: one file per version, the newest `keep` stay.

    Raises (on the publisher's thread, so at the next publish):
        WeightsError: the directory cannot be written.
    """

    keeps_previous = False

    def __init__(self, rendezvous: PublisherRendezvous, directory: Path, keep: int = 3) -> None:
        self._rendezvous = rendezvous
        self._directory = directory
        self._keep = keep
        self._stats: dict[str, float] = dict.fromkeys(("wire_s", "bytes", "engines", "resends", "epoch"), 0.0)
        self._stats["sent_version"] = float(NO_VERSION)
        self._board: dict[str, Any] = {"transport": "files", "directory": str(directory.resolve())}
        directory.mkdir(parents=True, exist_ok=True)
        rendezvous.announce({"weights": self._board})

    def send(self, snapshot: Snapshot, previous: Snapshot | None = None) -> None:
        started = time.perf_counter()
        tensors = snapshot.manifest.views(snapshot.buffers)
        fingerprint = tensors_fingerprint(tensors)
        path = self._directory / f"v{snapshot.policy_version:08d}.safetensors"
        partial = path.with_suffix(".partial")
        try:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, partial)
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"weights could not be written to {path}: {error}. Free space, or fix its rights."
            ) from error
        announced: dict[str, Any] = {"policy_version": snapshot.policy_version, "file": path.name}
        announced["fingerprint"] = fingerprint
        if snapshot.canary is not None:
            announced["canary"] = snapshot.canary.to_wire()
        self._rendezvous.announce({"weights": self._board | announced})
        for old in sorted(self._directory.glob("v*.safetensors"))[: -self._keep]:
            old.unlink(missing_ok=True)
        served = sum(member.policy_version != NO_VERSION for member in self._rendezvous.members())
        found = {"engines": float(served), "bytes": float(snapshot.manifest.nbytes)}
        found |= {"wire_s": time.perf_counter() - started, "sent_version": float(snapshot.policy_version)}
        self._stats |= found

    def idle(self, newest: Snapshot | None) -> None:
        """Nothing to do: a newcomer reads the newest file by itself."""

    def stats(self) -> dict[str, float]:
        """`engines`: those that served some version when the last one was announced."""
        return {f"weights/{key}": value for key, value in self._stats.items()}

    def close(self) -> None:
        """The files stay: they are how a late worker catches up."""


class FilesSubscriber(SubscriberThread):
    """Implements `weights.base.Subscriber`: watches the board for the newest file."""

    def __init__(
        self,
        rendezvous: SubscriberRendezvous,
        load: LoadWeights,
        proof: Proof | None = None,
        stall_s: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(rendezvous, load, "files", proof, stall_s)
        self._thread.start()

    def _run(self) -> None:
        revision, retry = -1, False
        # Waits for the learner to announce a version, for as long as this worker lives.
        while not self._closed.is_set():
            board = self._rendezvous.watch(-1 if retry else revision, 1.0)
            revision = board.revision
            announced = board.values.get("weights") or {}
            version = announced.get("policy_version")
            if version is None or version == self._policy_version:
                retry = False
                continue
            retry = not self._take(Path(announced["directory"]) / announced["file"], int(version), announced)
            if retry:
                self._closed.wait(0.2)

    def _take(self, path: Path, policy_version: int, announced: dict[str, Any]) -> bool:
        """Read, verify and load one file; false (and the old version stays) when it is torn, gone or another."""
        started = time.perf_counter()
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            self._stats["nacks"] += 1
            log.warning("weights: %s cannot be read (%s); still serving version %d", path, error, self._policy_version)
            return False
        self._stats["receive_s"] += time.perf_counter() - started
        if tensors_fingerprint(tensors) != announced["fingerprint"]:
            self._stats["nacks"] += 1
            log.warning("weights: %s is damaged; still serving version %d", path, self._policy_version)
            return False
        canary = announced.get("canary")
        self._serve(policy_version, announced["fingerprint"], tensors, beat=lambda: None, canary=canary)
        return True


def tensors_fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """Chained fingerprint of named tensors in the order of their names, whatever order a file keeps them in."""
    parts = []
    for name, tensor in sorted(tensors.items()):
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        parts.append(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{bucket_fingerprint(flat)}")
    return chain(parts)
