"""Files transport, both ends: safetensors in a directory that learner and workers share.

The learner writes `v<version>.safetensors` under a temporary name and renames it; the board then names the newest. A
file says in its header in which buckets its tensors were copied. A reader takes it only after the fingerprints of
header and buckets, recomputed from what was read, are those on the board.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrl.errors import DiskFullError, WeightsError
from asyncrl.storage.full_disk import Patience
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import LoadWeights, PublisherRendezvous, SubscriberRendezvous
from asyncrl.weights.canary import Proof
from asyncrl.weights.fingerprint import Fingerprint, chain
from asyncrl.weights.manifest import Bucket, Manifest
from asyncrl.weights.publishing.snapshot import Snapshot
from asyncrl.weights.subscriber import SubscriberThread

log = logging.getLogger(__name__)
_HEADER = "manifest"


class FilesSender:
    """Implements `snapshot.Sender`: one file per version, the newest `keep` stay.

    Raises (on the publisher's thread, so at the next publish):
        WeightsError: the directory cannot be written. DiskFullError: see `Patience`.
    """

    keeps_previous = False

    def __init__(
        self, rendezvous: PublisherRendezvous, directory: Path, keep: int = 3, patience: Patience | None = None
    ) -> None:
        self._rendezvous, self._patience = rendezvous, patience or Patience()
        self._directory = directory
        self._keep = keep
        self._stats: dict[str, float] = dict.fromkeys(("wire_s", "bytes", "engines", "resends", "epoch"), 0.0)
        self._stats["sent_version"] = float(NO_VERSION)
        self._board: dict[str, Any] = {"transport": "files", "directory": str(directory.resolve())}
        directory.mkdir(parents=True, exist_ok=True)
        rendezvous.announce({"weights": self._board})

    def send(self, snapshot: Snapshot, previous: Snapshot | None = None) -> None:
        started = time.perf_counter()
        snapshot.filling.wait()
        tensors = snapshot.manifest.views(snapshot.buffers)
        header = json.dumps(snapshot.manifest.to_wire())
        prints = [snapshot.fingerprint(index) for index in range(len(snapshot.buffers))]
        path = self._directory / f"v{snapshot.policy_version:08d}.safetensors"
        partial = path.with_suffix(".partial")

        def write() -> None:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, partial, {_HEADER: header})
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.replace(path)

        try:
            nbytes = sum(buffer.nbytes for buffer in snapshot.buffers)
            self._patience.through(path, nbytes, write, (OSError, SafetensorError))
        except DiskFullError:
            raise
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"weights could not be written to {path}: {error}. Free space, or fix its rights."
            ) from error
        announced: dict[str, Any] = {"policy_version": snapshot.policy_version, "file": path.name}
        announced |= {"layout": chain([header]), "fingerprint": chain(prints)}
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
                header = (file.metadata() or {}).get(_HEADER, "")
        except (OSError, SafetensorError) as error:
            self._stats["nacks"] += 1
            log.warning("weights: %s cannot be read (%s); still serving version %d", path, error, self._policy_version)
            return False
        self._stats["receive_s"] += time.perf_counter() - started
        if chain([header]) != announced["layout"] or file_fingerprint(header, tensors) != announced["fingerprint"]:
            self._stats["nacks"] += 1
            log.warning("weights: %s is damaged; still serving version %d", path, self._policy_version)
            return False
        canary = announced.get("canary")
        self._serve(policy_version, announced["fingerprint"], tensors, beat=lambda: None, canary=canary)
        return True


def file_fingerprint(header: str, tensors: dict[str, torch.Tensor]) -> str:
    """Of the tensors of a file, in the buckets that its verified header names; "" when they are others."""
    manifest = Manifest.from_wire(json.loads(header))
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in manifest.shapes().items()}
    if described != {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}:
        return ""
    return chain(_laid_out(bucket, tensors) for bucket in manifest.buckets)


def _laid_out(bucket: Bucket, tensors: dict[str, torch.Tensor]) -> str:
    """Fingerprint of the bucket that these tensors would fill, without building it."""
    fingerprint, done = Fingerprint(), 0
    for entry in bucket.entries:
        fingerprint.update(torch.zeros(entry.offset - done, dtype=torch.uint8))
        fingerprint.update(tensors[entry.name])
        done = entry.offset + entry.nbytes
    fingerprint.update(torch.zeros(bucket.nbytes - done, dtype=torch.uint8))
    return fingerprint.hex()
