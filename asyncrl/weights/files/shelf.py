"""Storage of published files: the learner's own folder, or any fsspec URL."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from pathlib import Path
from typing import Any, Protocol

import fsspec

from asyncrl.checks.machine import unopenable
from asyncrl.errors import ConfigError, WeightsError

log = logging.getLogger(__name__)
_AGAIN_S = 1.0
_TAG = "tag"


class Shelf(Protocol):
    @property
    def told(self) -> dict[str, Any]:
        """What readers need to find the files; put on the board."""
        ...

    def put(self, path: Path) -> None:
        """Store a whole file that was written to the learner's folder. Raises WeightsError."""
        ...

    def drop(self, name: str) -> None:
        """Remove a published file, if it exists. Never raises."""
        ...

    def drop_local(self, name: str, *, published: bool) -> None:
        """The learner needs this file no more; `published`: readers may."""
        ...

    def left(self) -> list[str]:
        """Names of files from earlier starts of this run."""
        ...


class FolderShelf:
    """Implements `Shelf`: the files stay where they were written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.told: dict[str, Any] = {"directory": str(folder.resolve())}

    def put(self, path: Path) -> None:
        """Nothing to do: the file is already there."""

    def drop(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink(missing_ok=True)

    def drop_local(self, name: str, *, published: bool) -> None:
        if not published:
            self.drop(name)

    def left(self) -> list[str]:
        return _written_in(self._folder)


class UrlShelf:
    """Implements `Shelf` over any fsspec file system. Only files of this run are ever removed there.

    Args:
        read_url: URL from which readers fetch the files; empty: `url` itself.
        within_s: seconds for which a failing upload is retried.

    Raises:
        ConfigError: fsspec does not know such a URL, lacks the package for it, or cannot write there.
    """

    def __init__(self, url: str, folder: Path, *, read_url: str = "", within_s: float = 300.0) -> None:
        for problem in unopenable("weights.url", url):
            raise ConfigError(problem)
        self._url, self._folder, self._within_s = url, folder, within_s
        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")
        self._made = False
        self.told: dict[str, Any] = {"url": read_url or url}

    def put(self, path: Path) -> None:
        """Upload a file, retrying for `within_s`: a missing version blocks all later ones."""
        deadline, target = time.monotonic() + self._within_s, f"{self._root}/{path.name}"
        while True:
            try:
                if not self._made:
                    self._files.makedirs(self._root, exist_ok=True)
                    self._made = True
                self._files.put_file(str(path), target)
                self._files.invalidate_cache()
                there, here = self._files.size(target), path.stat().st_size
                if there != here:
                    raise OSError(f"{there} bytes of {here} arrived")
                break
            except Exception as error:  # seam: each file system has its own errors
                if time.monotonic() >= deadline:
                    raise WeightsError(
                        f"weights could not be written to {self._url} for {self._within_s:.0f} s: {error}. Check that "
                        "the learner's machine may write there (weights.url)"
                    ) from error
                log.warning("weights: %s could not be written to %s (%s); trying again", path.name, self._url, error)
            time.sleep(_AGAIN_S)

    def drop_local(self, name: str, *, published: bool) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink(missing_ok=True)

    def drop(self, name: str) -> None:
        try:
            (self._folder / name).unlink(missing_ok=True)
            if self._files.exists(f"{self._root}/{name}"):
                self._files.rm_file(f"{self._root}/{name}")
        except Exception as error:  # seam: each file system has its own errors
            log.warning("weights: %s/%s could not be removed: %s", self._url, name, error)

    def left(self) -> list[str]:
        mine = f"-{tag_of(self._folder)}-"
        try:
            there = [str(path).rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
        except Exception:  # seam: each file system has its own errors; nothing was ever stored there
            there = []
        return [name for name in there if mine in name] + _written_in(self._folder)


def _written_in(folder: Path) -> list[str]:
    """Names of weight files, complete or partial."""
    return [path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".partial")]


def tag_of(folder: Path) -> str:
    """Tag of the run in the names of its files, so that two runs under one URL leave each other's files alone. Made
    once per folder."""
    path = folder / _TAG
    with contextlib.suppress(OSError):
        found = path.read_text()
        if len(found) == 8:
            return found
    tag = secrets.token_hex(4)
    path.write_text(tag)
    return tag
