"""Publisher's end of weights as files: each is written under a temporary name, renamed, put on the shelf and announced.

The board names a version only once all files that lead to it are available, with the fingerprints of header and
buckets, so a reader never sees half a version. The header of a full file names the buckets in which its tensors were
copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from asyncrl.errors import DiskFullError, WeightsError
from asyncrl.storage.full_disk import disk_space
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import PublisherRendezvous
from asyncrl.weights.delta import DeltaChoice, encode
from asyncrl.weights.files.items import Item
from asyncrl.weights.files.shelf import FolderShelf, Shelf, tag_of
from asyncrl.weights.fingerprint import chain
from asyncrl.weights.publishing.snapshot import Snapshot

MANIFEST, HEADERS = "manifest", "headers"
"""Keys in the metadata: of a full file; and of a delta, for `[kind, bytes, elements]` of each bucket's payload."""
KEPT = 3
"""Number of full versions that are kept."""
LONGEST = 16
"""Number of deltas after which a full version is due; bounds what a newcomer has to apply."""
_STATS = ("wire_s", "wire_bytes", "delta_s", "bytes", "engines", "resends", "epoch")


class FilesSender:
    """Implements `snapshot.Sender`. The newest `KEPT` full versions are kept, and the deltas since the oldest of them.

    Args:
        folder: used by this run alone; files that an earlier start left in it are removed once the first version is
            there.
        shelf: where files go that readers do not open in `folder`; sha256 digests are then announced too.
        delta: `weights.delta`. With deltas a full version is written for every `LONGEST`, or when together they have
            reached its size: a newcomer reads at most twice the bytes of the weights.

    Raises (on the publisher's thread, so at the next publish):
        WeightsError: a file cannot be written, or put on the shelf. DiskFullError: there was no space.
    """

    sends_buckets = True

    def __init__(
        self,
        rendezvous: PublisherRendezvous,
        folder: Path,
        *,
        delta: str = "never",
        shelf: Shelf | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rendezvous = rendezvous
        self._folder, self._digests = folder, shelf is not None
        self._shelf = shelf or FolderShelf(folder)
        self._delta = DeltaChoice(delta)
        self._items: list[Item] = []
        self._fingerprint = ""
        """Fingerprint of the last announced version."""
        self._name_end = f"-{tag_of(folder)}-{secrets.token_hex(4)}"
        self._dropped = self._shelf.left()
        """Files to remove once the first version of this start is there, or nobody reads them any more."""
        self._stats: dict[str, float] = dict.fromkeys(_STATS, 0.0) | {"sent_version": float(NO_VERSION)}
        transport = "files" if shelf is None else "pull"
        self._board: dict[str, Any] = {"transport": transport, "deltas": self._delta.possible, **self._shelf.told}
        rendezvous.announce({"weights": self._board})

    @property
    def keeps_previous(self) -> bool:
        return self._delta.possible

    def send(self, snapshot: Snapshot, previous: Snapshot | None = None) -> None:
        started = time.perf_counter()
        snapshot.filling.wait()
        header = json.dumps(snapshot.manifest.to_wire())
        fingerprint = chain(snapshot.all_fingerprints())
        found = {"delta_s": 0.0, "wire_bytes": 0.0}
        if fingerprint != self._fingerprint:
            new = self._new_items(snapshot, previous, fingerprint, header, found)
            self._items += new
            found["wire_bytes"] = float(sum(item.nbytes for item in new))
        self._fingerprint = fingerprint
        announced: dict[str, Any] = {"policy_version": snapshot.policy_version, "layout": chain([header])}
        announced |= {"fingerprint": fingerprint, "items": [item.to_wire() for item in self._items[-2 * LONGEST :]]}
        if snapshot.canary is not None:
            announced["canary"] = snapshot.canary.to_wire()
        self._rendezvous.announce({"weights": self._board | announced})
        self._tidy()
        served = sum(member.policy_version != NO_VERSION for member in self._rendezvous.members())
        found |= {"engines": float(served), "bytes": float(snapshot.manifest.nbytes)}
        found |= {"wire_s": time.perf_counter() - started, "sent_version": float(snapshot.policy_version)}
        self._stats = self._stats | found

    def idle(self, newest: Snapshot | None) -> None:
        """Nothing to do: a newcomer reads the newest version itself."""

    def stats(self) -> dict[str, float]:
        """`engines`: number of engines that served some version when the last one was announced."""
        return {f"weights/{key}": value for key, value in self._stats.items()}

    def close(self) -> None:
        self._shelf.close()

    def _new_items(
        self, snapshot: Snapshot, previous: Snapshot | None, fingerprint: str, header: str, found: dict[str, float]
    ) -> list[Item]:
        """Write a delta if one is wanted and smaller, a full version if one is due, or both."""
        items = []
        if previous is not None and self._announced(previous) and self._delta.wanted():
            began = time.perf_counter()
            items = self._write_delta(snapshot, previous, fingerprint)
            found["delta_s"] = time.perf_counter() - began
        full = self._full()
        since = self._items[full[-1] + 1 :] if full else []
        if (
            not items
            or len(since) + 1 >= LONGEST
            or sum(i.nbytes for i in [*since, *items]) >= snapshot.manifest.nbytes
        ):
            tensors = snapshot.manifest.views(snapshot.buffers)
            name = f"v{snapshot.policy_version:08d}{self._name_end}.safetensors"
            # Last, because the bytes of the deltas that follow it are counted from it.
            items.append(self._write(name, tensors, {MANIFEST: header}, snapshot.manifest.nbytes, fingerprint))
            self._delta.sent_full(float(items[-1].nbytes))
        return items

    def _full(self) -> list[int]:
        """Indices of the full versions among the items."""
        return [number for number, item in enumerate(self._items) if not item.base]

    def _announced(self, snapshot: Snapshot) -> bool:
        """Whether the readers have this version."""
        return bool(self._items) and chain(snapshot.all_fingerprints()) == self._fingerprint

    def _write_delta(self, snapshot: Snapshot, previous: Snapshot, fingerprint: str) -> list[Item]:
        """Write a delta; returns an empty list if it would be as large as the version itself."""
        buckets = zip(snapshot.buffers, previous.buffers, snapshot.manifest.buckets, strict=True)
        encoded = [encode(new.cpu(), old.cpu(), bucket.element_bytes) for new, old, bucket in buckets]
        nbytes = sum(len(each.payload) for each in encoded)
        # Deltas that save less than half are not worth their cost: `auto` then pauses for a while.
        self._delta.sent_delta(0.0, 2.0 * nbytes)
        if nbytes >= snapshot.manifest.nbytes:
            return []
        payloads = {str(number): each.payload for number, each in enumerate(encoded)}
        headers = {HEADERS: json.dumps([each.header() for each in encoded])}
        name = f"v{snapshot.policy_version:08d}{self._name_end}.delta.safetensors"
        return [self._write(name, payloads, headers, nbytes, fingerprint, base=self._fingerprint)]

    def _write(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        metadata: dict[str, str],
        nbytes: int,
        fingerprint: str,
        base: str = "",
    ) -> Item:
        path = self._folder / name
        partial = path.with_suffix(".partial")

        def write() -> tuple[int, str]:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, partial, metadata)
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest() if self._digests else ""
                size = os.fstat(file.fileno()).st_size
            partial.replace(path)
            return size, digest

        try:
            with disk_space(path, nbytes, (OSError, SafetensorError)):
                size, digest = write()
        except DiskFullError:
            raise
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"weights could not be written to {path}: {error}. Free space, or fix its rights."
            ) from error
        self._shelf.put(path)
        return Item(name=name, nbytes=size, digest=digest, fingerprint=fingerprint, base=base)

    def _tidy(self) -> None:
        """Remove files older than the oldest full version that is kept, once nobody reads them."""
        full = self._full()
        first = full[-KEPT] if len(full) > KEPT else 0
        self._dropped += [item.name for item in self._items[:first]]
        self._items = self._items[first:]
        self._dropped = [name for name in self._dropped if not self._shelf.drop(name)]
