"""Sealed folders, which are either complete and verified or absent: write aside, sync, list with hashes, rename."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import xxhash

from asyncrl.errors import CheckpointDamagedError
from asyncrl.storage.objects import read_object

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 22
SETTLED_NS = 2_000_000_000
"""Nanoseconds after a change within which a file may change again without getting another time."""

Marks = tuple[tuple[str, int, int, int], ...]
_whole: dict[tuple[Path, bool], Marks] = {}
"""Folders that this process has verified, with the marks that would show a later change. A start verifies the
checkpoint that it resumes from several times, and each verification would read all of it."""


class Entry(TypedDict):
    """Entry of a file in the manifest."""

    bytes: int
    xxh3_128: str


Entries = dict[str, Entry]
"""Entries by the file's path within the folder."""


def seal(folder: Path, known: Mapping[str, Entry] | None = None) -> None:
    """Sync every file to disk. Write the manifest of their sizes and hashes last, with a hash of its own.

    Args:
        known: entries of files that their writers have already synced and hashed.
    """
    known = known or {}
    others = [path for path in _files(folder) if path.relative_to(folder).as_posix() not in known]
    entries = dict(sorted({**known, **entries_of(folder, others)}.items()))
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": entries, "seal": _seal_of(entries)}, indent=1) + "\n")
    sync(manifest)
    sync(folder)


def entries_of(folder: Path, paths: Iterable[Path]) -> Entries:
    """Sync the given files of `folder` to disk and hash them. Raises OSError."""
    entries: Entries = {}
    for path in paths:
        sync(path)
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "xxh3_128": _digest(path)}
    return entries


def _files(folder: Path) -> list[Path]:
    """All files but the manifest."""
    return sorted(path for path in folder.rglob("*") if not path.is_dir() and path != folder / MANIFEST)


def _seal_of(entries: Mapping[str, Entry]) -> str:
    """Hash over names, sizes and hashes; without it, a manifest that lost an entry would still be accepted."""
    return xxhash.xxh3_128(json.dumps(entries, sort_keys=True).encode()).hexdigest()


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a folder to write into. On success it is sealed and becomes `target`; on failure it is removed, which frees
    its space. The previous `target` is there completely or not at all."""
    aside, old = (target.with_name(target.name + suffix) for suffix in (".tmp", ".old"))
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        seal(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if target.is_dir():
        target.rename(old)
    move_into_place(aside, target)
    shutil.rmtree(old, ignore_errors=True)


def strangers(folder: Path) -> list[str]:
    """Names of files in `folder` that its manifest does not list; all files if there is no manifest."""
    try:
        known = {MANIFEST, *_read_manifest(folder / MANIFEST, "")}
    except (OSError, CheckpointDamagedError):
        known = set()
    return [
        name for path in folder.rglob("*") if not path.is_dir() and (name := str(path.relative_to(folder))) not in known
    ]


def move_into_place(aside: Path, target: Path) -> None:
    """Rename, and sync the rename, so that it survives a power failure."""
    aside.rename(target)
    sync(target.parent)


def replace_text(path: Path, text: str | bytes, aside: Path | None = None) -> None:
    """Write `text` aside and rename it: a reader sees the old or the new. Not synced: a power failure may undo it."""
    aside = aside or path.with_name(f"{path.name}.tmp")
    aside.write_bytes(text if isinstance(text, bytes) else text.encode())
    aside.replace(path)


def replace_durably(path: Path, text: str | bytes) -> None:
    """As `replace_text`, but synced: a power failure does not undo it."""
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_bytes(text if isinstance(text, bytes) else text.encode())
    sync(aside)
    move_into_place(aside, path)


def point(link: Path, target: Path) -> None:
    """Make `link` point to `target` (a folder next to it) atomically: a reader sees the old or the new, never none."""
    fresh = link.with_name(link.name + ".tmp")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.name)
    if link.is_dir() and not link.is_symlink():  # a run folder copied by a tool that follows links, such as scp
        shutil.rmtree(link.with_name(f"{link.name}.copied"), ignore_errors=True)
        link.rename(link.with_name(f"{link.name}.copied"))
    fresh.replace(link)
    sync(link.parent)


def remove(folder: Path) -> None:
    """Rename, then delete, so that a kill in between leaves nothing that looks like a checkpoint."""
    shutil.rmtree(retire(folder))


def retire(folder: Path) -> Path:
    """Rename a folder that is to be removed. Returns its new name, which is not that of a checkpoint."""
    doomed = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    return folder.rename(doomed)


def is_sealed(folder: Path) -> bool:
    """Whether the folder has a manifest of this program, intact or not; other programs have files of that name too."""
    try:
        return b'"xxh3_128"' in (folder / MANIFEST).read_bytes()
    except OSError:
        return False


def verify_export(folder: Path) -> None:
    """As `verify`, for an exported model; the user may have added other files.

    Raises:
        CheckpointDamagedError: naming the first file that is missing, cut short or changed.
    """
    verify(folder, f"restore it from a copy, or delete {folder} and resume=auto the run: it writes it again", more=True)


def verify(folder: Path, way_out: str = "", *, more: bool = False) -> None:
    """Compare every file with the manifest, and the manifest with its seal. With `more`, other files are allowed.

    What this process found intact, and nobody has touched since, is not read again.

    Raises:
        CheckpointDamagedError: naming the first file that is missing, cut short, changed or not listed.
    """
    way_out = way_out or f"restore it from a copy, or delete {folder} and resume from an older checkpoint: resume=PATH"
    marks = _marks(folder)
    if marks and _whole.get((folder, more)) == marks:
        return
    entries = _read_manifest(folder / MANIFEST, way_out)
    for path in _files(folder):
        if not more and path.relative_to(folder).as_posix() not in entries:
            raise CheckpointDamagedError(f"{path} is not in {MANIFEST}, so it was added later; remove it, or {way_out}")
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointDamagedError(f"{path} is missing; {way_out}")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointDamagedError(
                f"{path} has {path.stat().st_size} bytes instead of {entry['bytes']}, or {MANIFEST} beside it was "
                f"changed; {way_out}"
            )
        if _digest(path) != entry["xxh3_128"]:
            raise CheckpointDamagedError(
                f"{path} was changed after it was written, or {MANIFEST} beside it was: its hash differs; {way_out}"
            )
    _whole[folder, more] = marks


def _marks(folder: Path) -> Marks:
    """Return the path, inode, size and change time of every file; empty if a file changed so recently that they would
    prove nothing."""
    try:
        found = [(path, path.stat()) for path in [folder / MANIFEST, *_files(folder)]]
    except OSError:
        return ()
    if any(time.time_ns() - stat.st_ctime_ns < SETTLED_NS for _, stat in found):
        return ()
    return tuple((str(path), stat.st_ino, stat.st_size, stat.st_ctime_ns) for path, stat in found)


def _read_manifest(manifest: Path, way_out: str) -> Entries:
    try:
        said = read_object(manifest)
        entries, seal = said["files"], said["seal"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointDamagedError(
            f"{manifest} is missing, so the files beside it cannot be verified; {way_out}"
        ) from error
    except (IsADirectoryError, ValueError, KeyError, TypeError) as error:  # another OSError is no damage: it may pass
        raise CheckpointDamagedError(f"{manifest} is damaged ({error!r}); {way_out}") from error
    if not isinstance(entries, dict) or not entries or seal != _seal_of(entries):
        raise CheckpointDamagedError(
            f"{manifest} is damaged: its list of files does not match the hash at its end; {way_out}"
        )
    return entries


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
