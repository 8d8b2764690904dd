"""Completes a checkpoint: every rank hashes the files that it wrote, and rank 0 checks that it sees all of them.

Hashing means reading a checkpoint again, which takes time in proportion to its size; if one rank hashed everything, all
others would wait for it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from asyncrl.errors import CheckpointError, RunFolderError
from asyncrl.learner.parallel.collectives import however_long, text_of_rank_zero, texts_of_ranks
from asyncrl.storage import sealed

SEEN_WITHIN_S = 60.0
"""Seconds within which other ranks see what a rank wrote: a network file system caches directory listings as long."""
LOOK_EVERY_S = 0.2
PROBE = ".probe_"
ONE_FOLDER = (
    "the ranks save one checkpoint together, so run.dir must name one folder that all learner machines share (NFS, "
    "Lustre, ...). Mount one there, or train on one machine"
)


def refuse_unshared(folder: Path, rank: int, device: torch.device, *, within_s: float = SEEN_WITHIN_S) -> None:
    """Check that every rank sees what rank 0 writes into `folder`. Collective.

    Raises:
        RunFolderError: on every rank, naming those that do not see it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    probe, token = folder / f"{PROBE}{uuid.uuid4().hex}", uuid.uuid4().hex
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{PROBE}*"):  # left by a start that was killed
            old.unlink(missing_ok=True)
        probe.write_text(token)
    try:
        name, _, token = text_of_rank_zero(f"{probe.name} {token}", device).partition(" ")
        seen = _in_time(lambda: _content(folder / name) == token, within_s)
        blind = [line for line in texts_of_ranks("" if seen else f"rank {rank} ({folder})", device) if line]
    finally:
        if rank == 0:
            probe.unlink(missing_ok=True)
    if blind:
        raise RunFolderError(
            f"{', '.join(blind)} did not see a file that rank 0 wrote into its run folder within {within_s:g} s: "
            f"{ONE_FOLDER}"
        )


def prove_own(
    folder: Path,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    within_s: float = SEEN_WITHIN_S,
) -> sealed.Entries:
    """Sync and hash on each rank, in parallel, the files that it wrote into `folder`; on rank 0 compare them with DCP's
    metadata and with the files that it sees. Collective, without a limit on its duration.

    Returns:
        The entries of all ranks' files for the manifest; on rank 0 only.

    Raises:
        CheckpointError: on every rank: a file could not be read, or rank 0 does not see it.
    """
    told = texts_of_ranks(however_long(lambda: _own(folder, rank), device, group), device, group)
    entries: sealed.Entries = {}
    for part in (json.loads(line) for line in told):
        if isinstance(part, str):
            raise CheckpointError(part)
        entries |= part
    missing = however_long(lambda: _missing(folder, entries, within_s) if rank == 0 else "", device, group)
    missing = text_of_rank_zero(missing, device, group)
    if missing:
        raise CheckpointError(f"{missing}. Earlier checkpoints are intact")
    return entries if rank == 0 else {}


def _own(folder: Path, rank: int) -> str:
    """JSON of the entries of this rank's files, or of an error message."""
    try:
        return json.dumps(sealed.entries_of(folder, sorted(folder.glob(f"__{rank}_*"))))
    except OSError as error:
        return json.dumps(f"rank {rank} cannot read back what it wrote into {folder}: {error}")


def _missing(folder: Path, entries: Mapping[str, sealed.Entry], within_s: float) -> str:
    """Describes a file in the metadata that no rank wrote, or that rank 0 does not see; empty if all are there."""
    promised = promised_bytes(FileSystemReader(folder).read_metadata())
    unwritten = [name for name, end in promised.items() if name not in entries or entries[name]["bytes"] < end]
    if unwritten:
        return f"{folder} lacks tensors: no rank wrote all of {', '.join(sorted(unwritten)[:4])}"
    until = time.monotonic() + within_s
    for name, entry in sorted(entries.items()):
        left = max(0.0, until - time.monotonic())
        if not _in_time(lambda name=name, entry=entry: _size(folder / name) == entry["bytes"], left):
            return f"{folder / name} was written by another rank, but rank 0 does not see it: {ONE_FOLDER}"
    return ""


def promised_bytes(metadata: Metadata) -> dict[str, int]:
    """Map each file to the smallest size in bytes with which it can contain what the metadata places in it."""
    ends: dict[str, int] = {}
    for part in (metadata.storage_data or {}).values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    return ends


def _in_time(happened: Callable[[], bool], within_s: float) -> bool:
    """Whether `happened` returns true in time. waits for: another machine's write. unblocked by: its file system, or
    the deadline."""
    until = time.monotonic() + within_s
    while not happened():
        if time.monotonic() >= until:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
