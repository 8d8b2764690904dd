"""Fetches a published file from an HTTP server or any fsspec URL; a broken transfer is resumed.

The bytes are kept in a file without a name, so that a killed worker leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol, cast

import fsspec
import httpx

from asyncrl.errors import WeightsError
from asyncrl.weights.files.items import Item

_BLOCK = 4 << 20


class AlteredError(WeightsError):
    """The received bytes are not those that the learner wrote."""


class UnreachableError(WeightsError):
    """The file could not be fetched; a later try, or a newer version, may succeed."""


class Source(Protocol):
    def blocks(self, item: Item, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield `(offset, bytes)` from `start` on, or from 0 if the other end cannot start in the middle.

        Raises:
            UnreachableError: no further byte within the time limit, or none at all.
        """
        ...

    def close(self) -> None: ...


class HttpSource:
    """Implements `Source`.

    Args:
        timeout_s: longest wait for a connection or for the next bytes.
    """

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for every request
        headers = {"Accept-Encoding": "identity"}
        self._url = url.rstrip("/")
        # A connection that is kept open would occupy a slot of the server from one version to the next.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(headers=headers, timeout=timeout_s, limits=limits)

    def blocks(self, item: Item, start: int) -> Iterator[tuple[int, bytes]]:
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            with self._client.stream("GET", f"{self._url}/{item.name}", headers=headers) as answer:
                if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                    raise AlteredError(f"{item.name} has fewer than {start} bytes there")
                if answer.status_code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
                    raise UnreachableError(f"{self._url}/{item.name}: {answer.status_code} {answer.reason_phrase}")
                at = start if answer.headers.get("Content-Range", "").startswith(f"bytes {start}-") else 0
                if answer.status_code == httpx.codes.PARTIAL_CONTENT and at != start:
                    raise AlteredError(f"{self._url} sent other bytes of {item.name} than were requested")
                for block in answer.iter_raw(_BLOCK):
                    yield at, block
                    at += len(block)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreachableError(f"{self._url}/{item.name}: {type(error).__name__} {error}".rstrip()) from error

    def close(self) -> None:
        self._client.close()


class FsspecSource:
    """Implements `Source`. Not every file system bounds its own waits; if one hangs, the worker ends.

    Raises:
        WeightsError: fsspec knows no such URL here, or lacks the package for it.
    """

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        self._url, self._timeout_s = url, timeout_s
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise WeightsError(
                f"the weights are at {url}, which fsspec cannot open on this machine: {error}"
            ) from error
        self._root = root.rstrip("/")

    def blocks(self, item: Item, start: int) -> Iterator[tuple[int, bytes]]:
        came: queue.Queue[bytes | Exception | None] = queue.Queue(2)
        over = threading.Event()
        path = f"{self._root}/{item.name}"
        threading.Thread(target=self._read, args=(path, start, came, over), name="weights-read", daemon=True).start()
        try:
            while True:
                try:
                    block = came.get(timeout=self._timeout_s)
                except queue.Empty:
                    raise WeightsError(
                        f"{self._url} sent no byte of {item.name} and no error for "
                        f"weights.timeout_s={self._timeout_s:g} s. This worker ends, because the call cannot be ended "
                        "otherwise"
                    ) from None
                if block is None:
                    return
                if isinstance(block, Exception):
                    raise UnreachableError(f"{path}: {type(block).__name__} {block}") from block
                yield start, block
                start += len(block)
        finally:
            over.set()

    def _read(self, path: str, start: int, came: queue.Queue[bytes | Exception | None], over: threading.Event) -> None:
        def hand(block: bytes | Exception | None) -> None:
            while not over.is_set():  # ends when the reader takes the block or sets `over`
                try:
                    return came.put(block, timeout=0.5)
                except queue.Full:
                    continue

        try:
            self._files.invalidate_cache()
            with self._files.open(path, "rb", cache_type="none") as opened:
                file = cast(BinaryIO, opened)
                if start:
                    file.seek(start)
                while not over.is_set() and (block := file.read(_BLOCK)):
                    hand(block)
            hand(None)
        except Exception as error:  # thread boundary; each file system has its own errors
            hand(error)

    def close(self) -> None:
        pass


class Fetcher:
    """Fetches one file after another; the bytes of an interrupted transfer are kept for the next try.

    Args:
        url: location of the files.
        stopped: called between two blocks; whether to stop.
    """

    def __init__(self, url: str, timeout_s: float, stopped: Callable[[], bool]) -> None:
        web = url.startswith(("http://", "https://"))
        self._source: Source = HttpSource(url, timeout_s) if web else FsspecSource(url, timeout_s)
        self._stopped = stopped
        self._name = ""
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self.received = 0
        """Bytes received, of all files."""

    def fetch(self, item: Item) -> str:
        """Return the path of the whole file, valid until the next call.

        Raises:
            AlteredError: the file is not the one that was announced; the next call starts from the beginning.
            UnreachableError: interrupted; the next call resumes.
            WeightsError: the transfer stands still and cannot be stopped.
        """
        try:
            file = self._file if self._file is not None and self._name == item.name else self._begin(item.name)
            if file.tell() < item.nbytes:
                self._receive(item, file)
            file.flush()
        except OSError as error:
            self.end()
            raise UnreachableError(
                f"{item.name} cannot be kept in the temporary folder here (TMPDIR): {error}"
            ) from error
        except AlteredError:
            self.end()
            raise
        size, found = file.tell(), self._digest.hexdigest()
        if size != item.nbytes or found != item.digest:
            self.end()
            raise AlteredError(
                f"{item.name} arrived with {size:,} bytes of {item.nbytes:,} and sha256 {found[:12]}, not "
                f"{item.digest[:12]}"
            )
        return f"/proc/self/fd/{file.fileno()}"

    def _receive(self, item: Item, file: BinaryIO) -> None:
        for at, block in self._source.blocks(item, file.tell()):
            if self._stopped():
                raise UnreachableError("the worker is ending")
            if at != file.tell():  # the other end starts from the beginning
                self._begin_again(file)
            if file.tell() + len(block) > item.nbytes:
                raise AlteredError(f"{item.name} has more than the {item.nbytes:,} bytes that were announced")
            file.write(block)
            self._digest.update(block)
            self.received += len(block)

    def _begin(self, name: str) -> BinaryIO:
        self.end()
        self._name, self._digest = name, hashlib.sha256()
        self._file = cast(BinaryIO, tempfile.TemporaryFile(prefix="asyncrl-weights-"))  # noqa: SIM115 (kept open)
        return self._file

    def _begin_again(self, file: BinaryIO) -> None:
        file.seek(0)
        file.truncate()
        self._digest = hashlib.sha256()

    def end(self) -> None:
        """Free the disk space; a file that is not loaded by now is fetched again."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # on a full disk its buffer cannot be written; it is closed anyway
                file.close()

    def close(self) -> None:
        self.end()
        self._source.close()
