"""Worker's end of weights as files: watches the board, opens or fetches the files for the newest version, verifies it.

waits for:    the board, for as long as the worker lives; bytes, for `timeout_s` each
unblocked by: another version on the board, `close`
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from asyncrl.errors import WeightsError
from asyncrl.weights.base import LoadWeights, SubscriberRendezvous
from asyncrl.weights.canary import Proof
from asyncrl.weights.delta import Encoded, apply, payload_limit
from asyncrl.weights.files.fetching import AlteredError, Fetcher, UnreachableError
from asyncrl.weights.files.items import Item, way
from asyncrl.weights.files.sender import HEADERS, MANIFEST
from asyncrl.weights.fingerprint import bucket_fingerprint, chain
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.subscriber import Subscriber

log = logging.getLogger(__name__)
_AGAIN_S, _AGAIN_MOST_S = 0.2, 5.0


class Staged:
    """The weights of one version in host memory, to which deltas may be applied.

    `have` is their fingerprint; empty while they are incomplete, or before anything has been received.
    """

    def __init__(self) -> None:
        self.have = self.layout = ""
        self._manifest = Manifest(buckets=())
        self._buffers: list[torch.Tensor] = []

    def take(self, item: Item, path: str | Path, layout: str) -> None:
        """Apply the file at `path`. Raises AlteredError, UnreachableError."""
        self.have = ""
        try:
            with safe_open(path, framework="pt") as file:
                if item.base:
                    self._apply(file)
                else:
                    self._fill(file, layout)
        except OSError as error:
            raise UnreachableError(f"{path}: {error}") from error
        except AlteredError:
            raise
        except (SafetensorError, WeightsError, KeyError, ValueError, TypeError) as error:
            raise AlteredError(f"{item.name} is damaged: {error}") from error
        self.have, self.layout = item.fingerprint, layout

    def _fill(self, file: Any, layout: str) -> None:
        header = (file.metadata() or {}).get(MANIFEST, "")
        if chain([header]) != layout:
            raise AlteredError("its header is not the one that was announced")
        manifest = Manifest.from_wire(json.loads(header))
        if manifest != self._manifest or not self._buffers:
            self._buffers = []  # freed before others are allocated
            self._manifest, self._buffers = manifest, manifest.allocate()
        views = manifest.views(self._buffers)
        if set(views) != set(file.keys()):
            raise AlteredError("its tensors are not those that its header names")
        for name, view in views.items():
            tensor = file.get_tensor(name)
            if (tensor.shape, tensor.dtype) != (view.shape, view.dtype):
                raise AlteredError(f"{name} is {tensor.dtype} {list(tensor.shape)} there")
            view.copy_(tensor)

    def _apply(self, file: Any) -> None:
        headers = json.loads((file.metadata() or {}).get(HEADERS, "[]"))
        for number, (header, bucket) in enumerate(zip(headers, self._manifest.buckets, strict=True)):
            payload = file.get_tensor(str(number))
            if payload.dtype != torch.uint8 or len(payload) != payload_limit(header, bucket.nbytes):
                raise AlteredError(f"the payload of bucket {number} is not that of its header")
            encoded = Encoded(kind=header[0], payload=payload, changed=int(header[2]))
            apply(encoded, self._buffers[number], bucket.element_bytes)

    def fingerprint(self) -> str:
        """Fingerprint, recomputed from the bytes in memory."""
        return chain(bucket_fingerprint(buffer) for buffer in self._buffers)

    def views(self) -> dict[str, torch.Tensor]:
        """Every tensor by name; valid until the next `take`."""
        return self._manifest.views(self._buffers)


class FilesSubscriber(Subscriber):
    """Subscriber of the transport `files`.

    Args:
        timeout_s: longest wait for bytes; also how long a version that arrives altered from everywhere is requested
            again, before the worker ends with a WeightsError.
    """

    def __init__(
        self,
        rendezvous: SubscriberRendezvous,
        load: LoadWeights,
        proof: Proof | None = None,
        stall_s: Callable[[], float] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(rendezvous, load, "files", proof, stall_s)
        self._timeout_s = timeout_s
        self._staged = Staged()
        self._fetcher: Fetcher | None = None
        self._url = ""
        self._said = ""
        self._altered_since: tuple[str, float] = "", 0.0
        self._thread.start()

    def _run(self) -> None:
        revision, failures = -1, 0
        # Waits for the learner to announce a version for as long as this worker lives.
        while not self._closed.is_set():
            board = self._rendezvous.watch(-1 if failures else revision, 1.0)
            revision = board.revision
            announced = board.values.get("weights") or {}
            served = self._policy_version, self._fingerprint
            if "items" not in announced or (announced["policy_version"], announced["fingerprint"]) == served:
                failures = 0  # a learner that has just started has not announced one
                continue
            failures = 0 if self._take(announced) else failures + 1
            if failures:
                self._closed.wait(min(_AGAIN_S * 2 ** (failures - 1), _AGAIN_MOST_S))
        if self._fetcher is not None:
            self._fetcher.close()

    def _take(self, announced: Mapping[str, Any]) -> bool:
        """Fetch, verify and load one version; returns false (and the old one stays) if that is not possible now.

        Raises:
            WeightsError: as `_serve`; or the received bytes have been altered for too long.
        """
        version, fingerprint = int(announced["policy_version"]), str(announced["fingerprint"])
        started = time.perf_counter()
        try:
            self._stage(announced, fingerprint)
        except (AlteredError, UnreachableError) as error:
            self._stats["nacks"] += 1
            self._complain(version, error)
            if isinstance(error, AlteredError):
                self._bound(version, fingerprint, error)
            return False
        finally:
            self._stats["receive_s"] += time.perf_counter() - started
        self._said = ""
        self._serve(version, fingerprint, self._staged.views(), beat=lambda: None, canary=announced.get("canary"))
        if not announced.get("deltas"):
            self._staged = Staged()  # no delta will be applied to it: the next version is a full one
        return True

    def _stage(self, announced: Mapping[str, Any], fingerprint: str) -> None:
        """Bring the staged weights to the announced version. Raises AlteredError, UnreachableError."""
        layout = str(announced["layout"])
        have = self._staged.have if self._staged.layout == layout else ""
        items = [Item.from_wire(item) for item in announced["items"]]
        for item in way(items, fingerprint, have):
            self._staged.take(item, self._path(announced, item), layout)
        if self._fetcher is not None:
            self._fetcher.end()
        if self._staged.fingerprint() != fingerprint:
            self._staged.have = ""
            raise AlteredError(f"version {announced['policy_version']} is damaged: its fingerprint does not match")

    def _path(self, announced: Mapping[str, Any], item: Item) -> str | Path:
        if "directory" in announced:
            return Path(announced["directory"]) / item.name
        url = str(announced["url"])
        if self._fetcher is None or url != self._url:
            if self._fetcher is not None:
                self._fetcher.close()
            self._url, self._fetcher = url, Fetcher(url, self._timeout_s, self._closed.is_set)
        before = self._fetcher.received
        try:
            return self._fetcher.fetch(item)
        finally:
            self._stats["received_bytes"] += self._fetcher.received - before

    def _complain(self, version: int, error: Exception) -> None:
        """Log each reason once, so that a learner that is away for an hour does not fill the log."""
        if self._said != str(error) and not self._closed.is_set():
            self._said = str(error)
            log.warning(
                "weights: version %d: %s; still serving version %d, and trying again", version, error,
                self._policy_version,
            )  # fmt: skip

    def _bound(self, version: int, fingerprint: str, error: Exception) -> None:
        what, since = self._altered_since
        if what != fingerprint:
            self._altered_since = fingerprint, time.monotonic()
        elif time.monotonic() - since > self._timeout_s:
            raise WeightsError(
                f"version {version} arrived altered at every try for weights.timeout_s={self._timeout_s:g} s: {error}. "
                "Something between learner and worker changes it: a proxy, a cache or a disk"
            ) from error
