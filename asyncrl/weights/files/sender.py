"""Publisher's end of weights as files: each is written under a temporary name, renamed, put on the shelf and announced.

The board names a version only once all files that lead to it are available, with the fingerprints of header and
buckets, so a reader never sees half a version. The header of a full file names the buckets in which its tensors were
gathered. A version passes through memory bucket by bucket; the base of a delta is read from the file of the version
before.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import DiskFullError, WeightsError
from asyncrl.storage.full_disk import disk_space
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import PublisherRendezvous
from asyncrl.weights.delta import DeltaChoice, encode
from asyncrl.weights.files.items import Item
from asyncrl.weights.files.shelf import FolderShelf, Shelf, tag_of
from asyncrl.weights.files.tensor_file import TensorFileReader, TensorFileWriter, TensorRow, rows_of
from asyncrl.weights.fingerprint import bucket_fingerprint, chain
from asyncrl.weights.publishing.buffers import StagingBuffers
from asyncrl.weights.publishing.version import Version

MANIFEST, HEADERS = "manifest", "headers"
"""Keys in the metadata: of a full file; and of a delta, for `[kind, bytes, elements]` of each bucket's payload."""
KEPT = 3
"""Number of full versions that are kept."""
LONGEST = 16
"""Number of deltas after which a full version is due; bounds what a newcomer has to apply."""
_STATS = ("wire_s", "wire_bytes", "delta_s", "bytes", "engines", "resends", "epoch")
_FULL, _CHANGES, _DELTA = "full.partial", "changes.partial", "delta.partial"
"""Files that are being written: the version, the payloads of its delta, and these as a safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A version in the folder, under temporary names."""

    fingerprint: str
    size: int
    digest: str
    """Of the full file."""
    headers: list[list[Any]] | None = None
    """Of the delta's payloads; None if there is no delta."""
    delta_s: float = 0.0

    @property
    def delta_bytes(self) -> int:
        return sum(int(header[1]) for header in self.headers or ())


class FilesSender:
    """Implements `publishing.publisher.Sender`. The newest `KEPT` full versions are kept, and the deltas since the
    oldest of them.

    Args:
        folder: used by this run alone; files that an earlier start left in it are removed once the first version is
            there.
        shelf: where files go that readers do not open in `folder`; sha256 digests are then announced too.
        delta: `weights.delta`. With deltas a full version is published for every `LONGEST`, or when together they have
            reached its size: a newcomer reads at most twice the bytes of the weights. The file of the newest version
            stays in `folder` all the same: the next delta is computed from it.

    Raises (on the publisher's thread, so at the next publish):
        WeightsError: a file cannot be written, or put on the shelf. DiskFullError: the disk has no space for it.
    """

    behind = False

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
        self._buffers = StagingBuffers("cpu", count=1)
        self._old = torch.empty(0, dtype=torch.uint8)
        """A bucket of the version before."""
        self._items: list[Item] = []
        self._base: Path | None = None
        """File of the newest version, if there are deltas."""
        self._fingerprint = ""
        """Fingerprint of the last announced version."""
        self._name_end = f"-{tag_of(folder)}-{secrets.token_hex(4)}"
        self._dropped = self._shelf.left()
        """Files to remove once the first version of this start is there."""
        self._stats: dict[str, float] = dict.fromkeys(_STATS, 0.0) | {"sent_version": float(NO_VERSION)}
        self._board: dict[str, Any] = {"transport": "files", "deltas": self._delta.possible, **self._shelf.told}
        rendezvous.announce({"weights": self._board})

    def send(self, version: Version) -> None:
        started = time.perf_counter()
        header = json.dumps(version.manifest.to_wire())
        with_delta = self._base is not None and self._delta.wanted()

        def write() -> _Written:
            return self._write(version, header, with_delta=with_delta)

        path = self._folder / f"{self._name_of(version)}.safetensors"
        written = self._on_disk(path, version.manifest.nbytes, write)
        found = {"delta_s": written.delta_s, "wire_bytes": 0.0}
        if written.fingerprint != self._fingerprint:
            new = self._publish_files(version, written)
            self._items += new
            found["wire_bytes"] = float(sum(item.nbytes for item in new))
        for name in (_FULL, _CHANGES):
            (self._folder / name).unlink(missing_ok=True)
        self._fingerprint = written.fingerprint
        announced: dict[str, Any] = {"policy_version": version.policy_version, "layout": chain([header])}
        announced |= {"fingerprint": written.fingerprint}
        announced |= {"items": [item.to_wire() for item in self._items[-2 * LONGEST :]]}
        if version.canary is not None:
            announced["canary"] = version.canary.to_wire()
        self._rendezvous.announce({"weights": self._board | announced})
        self._tidy()
        served = sum(member.policy_version != NO_VERSION for member in self._rendezvous.members())
        found |= {"engines": float(served), "bytes": float(version.manifest.nbytes)}
        found |= {"wire_s": time.perf_counter() - started, "sent_version": float(version.policy_version)}
        self._stats = self._stats | found

    def idle(self, newest: Version | None) -> None:
        """Nothing to do: a newcomer reads the newest version itself."""

    def stats(self) -> dict[str, float]:
        """`engines`: number of engines that served some version when the last one was announced."""
        return {f"weights/{key}": value for key, value in self._stats.items()}

    def close(self) -> None:
        """The files stay, so that a late worker can catch up."""

    def _write(self, version: Version, header: str, *, with_delta: bool) -> _Written:
        """Write a version, and what changed since the one before."""
        rows, prints, headers, delta_s = rows_of(version.manifest), list[str](), list[list[Any]](), 0.0
        with contextlib.ExitStack() as opened:
            full = TensorFileWriter(self._folder / _FULL, rows, {MANIFEST: header}, digest=self._digests)
            opened.callback(full.close)
            base = changes = None
            if with_delta and self._base is not None:
                base = TensorFileReader(self._base)
                opened.callback(base.close)
                changes = opened.enter_context((self._folder / _CHANGES).open("wb"))
            for index, buffer in self._buckets(version):
                bucket = version.manifest.buckets[index]
                prints.append(bucket_fingerprint(buffer))
                full.write_bucket(bucket, buffer)
                if base is not None and changes is not None:
                    began = time.perf_counter()
                    if len(self._old) < bucket.nbytes:
                        self._old = torch.empty(bucket.nbytes, dtype=torch.uint8)
                    base.read_bucket(bucket, self._old[: bucket.nbytes])
                    encoded = encode(buffer, self._old[: bucket.nbytes], bucket.element_bytes)
                    changes.write(encoded.payload.numpy().data)
                    headers.append(encoded.header())
                    delta_s += time.perf_counter() - began
            size, digest = full.end()
        return _Written(
            fingerprint=chain(prints), size=size, digest=digest, headers=headers if with_delta else None,
            delta_s=delta_s,
        )  # fmt: skip

    def _buckets(self, version: Version) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each bucket's index and its bytes in host memory, valid until the next one."""
        largest = max((bucket.nbytes for bucket in version.manifest.buckets), default=0)
        with version.open() as buckets:
            for index, bucket in enumerate(version.manifest.buckets):
                contents = buckets.take(index)
                if contents.buffer is not None and contents.buffer.device.type == "cpu":
                    yield index, contents.buffer
                    continue
                self._buffers.reserve(largest, version.device)
                yield index, self._buffers.fill(0, bucket.nbytes, bucket, 0, contents.tensors).wait()

    def _publish_files(self, version: Version, written: _Written) -> list[Item]:
        """Publish a delta if there is one and it is smaller, the full version if that is due, or both."""
        items, whole, name = [], version.manifest.nbytes, self._name_of(version)
        if written.headers is not None:
            # Deltas that save less than half are not worth their cost: `auto` then pauses for a while.
            self._delta.sent_delta(0.0, 2.0 * written.delta_bytes)
            if written.delta_bytes < whole:
                items.append(self._publish_delta(f"{name}.delta.safetensors", written))
        path = self._folder / f"{name}.safetensors"
        (self._folder / _FULL).replace(path)
        full = self._full()
        since = self._items[full[-1] + 1 :] if full else []
        if not items or len(since) + 1 >= LONGEST or sum(i.nbytes for i in [*since, *items]) >= whole:
            self._shelf.put(path)
            # Last, because the bytes of the deltas that follow it are counted from it.
            items.append(
                Item(name=path.name, nbytes=written.size, digest=written.digest, fingerprint=written.fingerprint)
            )
            self._delta.sent_full(float(written.size))
        before, self._base = self._base, path if self._delta.possible else None
        for local in (before, path):
            if local is not None and local != self._base:
                self._shelf.drop_local(local.name, published=any(i.name == local.name for i in [*self._items, *items]))
        return items

    def _publish_delta(self, name: str, written: _Written) -> Item:
        path, rows = self._folder / name, [
            TensorRow(str(number), torch.uint8, (int(header[1]),), int(header[1]))
            for number, header in enumerate(written.headers or ())
        ]  # fmt: skip

        def write() -> tuple[int, str]:
            metadata = {HEADERS: json.dumps(written.headers)}
            file = TensorFileWriter(self._folder / _DELTA, rows, metadata, digest=self._digests)
            with contextlib.closing(file), (self._folder / _CHANGES).open("rb") as changes:
                while part := changes.read(4 << 20):
                    file.write(memoryview(part))
                return file.end()

        size, digest = self._on_disk(path, written.delta_bytes, write)
        shutil.move(self._folder / _DELTA, path)
        self._shelf.put(path)
        self._shelf.drop_local(name, published=True)
        return Item(name=name, nbytes=size, digest=digest, fingerprint=written.fingerprint, base=self._fingerprint)

    def _on_disk(self, path: Path, nbytes: int, write: Any) -> Any:
        try:
            with disk_space(path, nbytes):
                return write()
        except DiskFullError:
            raise
        except OSError as error:
            raise WeightsError(
                f"weights could not be written to {path}: {error}. Free space, or fix its rights."
            ) from error

    def _name_of(self, version: Version) -> str:
        return f"v{version.policy_version:08d}{self._name_end}"

    def _full(self) -> list[int]:
        """Indices of the full versions among the items."""
        return [number for number, item in enumerate(self._items) if not item.base]

    def _tidy(self) -> None:
        """Remove files older than the oldest full version that is kept."""
        full = self._full()
        first = full[-KEPT] if len(full) > KEPT else 0
        self._dropped += [item.name for item in self._items[:first]]
        self._items = self._items[first:]
        for name in self._dropped:
            self._shelf.drop(name)
        self._dropped = []
