"""A folder that is either whole and proven, or not there: write aside, sync, list with hashes, rename."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import xxhash

from asyncrl.errors import CheckpointError

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 22


def seal(folder: Path) -> None:
    """Sync every file to the disk and write the manifest of their sizes and hashes, last."""
    entries = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _sync(path)
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "xxh3_128": _digest(path)}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": entries}, indent=1) + "\n")
    _sync(manifest)
    _sync(folder)


def move_into_place(aside: Path, target: Path) -> None:
    """Rename, and make the rename itself survive a power cut."""
    aside.rename(target)
    _sync(target.parent)


def point(link: Path, target: Path) -> None:
    """Make `link` name `target` (a folder beside it) in one step: a reader sees the old or the new, never none."""
    fresh = link.with_name(link.name + ".tmp")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.name)
    fresh.replace(link)
    _sync(link.parent)


def remove(folder: Path) -> None:
    """Renamed first, so that a kill half-way leaves nothing that looks like a checkpoint."""
    doomed = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def verify(folder: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: naming the first file that is missing, cut short or changed.
    """
    way_out = f"restore it from a copy, or delete {folder} and resume from an older checkpoint with resume=PATH"
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is missing, so this is no finished checkpoint; {way_out}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error}); {way_out}") from error
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {way_out}")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes instead of {entry['bytes']}; {way_out}")
        if _digest(path) != entry["xxh3_128"]:
            raise CheckpointError(f"{path} was changed after it was written (hash differs); {way_out}")


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
