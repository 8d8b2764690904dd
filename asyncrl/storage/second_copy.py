"""A second copy of a checkpoint, behind any URL of fsspec: `python -m asyncrl.storage.second_copy STEP_DIR URL`.

URL/step_50/   the files of ckpt/step_50, manifest.json last: a copy without it is incomplete

Before the first copy, `python -m asyncrl.storage.second_copy --begin RUN URL` checks whether that run may copy there.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import fsspec

from asyncrl.storage.checkpoints import STATE_FILE, run_of
from asyncrl.storage.sealed import MANIFEST

PROBE = ".asyncrl-probe"


def begin_copies(run: str, url: str) -> str:
    """Check that files can be written under `url`, and that no checkpoints of a run other than `run` are there.

    Returns:
        The path under which the copies will be.

    Raises:
        FileExistsError: there are some. OSError, ValueError, ImportError: from fsspec: no such protocol, no permission.
    """
    files, root = fsspec.core.url_to_fs(url)
    root = root.rstrip("/")
    files.makedirs(root, exist_ok=True)
    files.pipe_file(f"{root}/{PROBE}", b"x")
    with contextlib.suppress(Exception):  # a place for backups may forbid deleting: then the file stays there
        files.rm_file(f"{root}/{PROBE}")
    for path in sorted(str(found) for found in files.ls(root, detail=False)):
        if path.rpartition("/")[2].startswith("step_"):
            _refuse_other(files, path, run)
    return root


def copy_checkpoint(checkpoint: Path, url: str) -> str:
    """Copy `checkpoint` to `url`. An older copy of the same name and run is replaced, an identical one is left as it
    is. Nothing else there is ever deleted.

    Returns:
        The path of the copy.

    Raises:
        FileExistsError: a copy from another run is there.
        OSError, ValueError, ImportError: from fsspec: no such protocol, no permission, a file that arrived cut short.
    """
    files, root = fsspec.core.url_to_fs(url)
    target = f"{root.rstrip('/')}/{checkpoint.name}"
    files.makedirs(target, exist_ok=True)
    manifest = (checkpoint / MANIFEST).read_bytes()
    names = [*json.loads(manifest)["files"], MANIFEST]
    if files.exists(f"{target}/{MANIFEST}"):
        there = files.cat_file(f"{target}/{MANIFEST}")
        if there == manifest:
            return target
        _refuse_other(files, target, run_of((checkpoint / STATE_FILE).read_bytes()))
        _remove_files(files, target, there, names)
    for name in names:
        files.put_file(str(checkpoint / name), f"{target}/{name}")
        there, here = files.size(f"{target}/{name}"), (checkpoint / name).stat().st_size
        if there != here:
            raise OSError(f"{target}/{name} has {there} bytes of {here}")
    return target


def _refuse_other(files: fsspec.AbstractFileSystem, target: str, run: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # an incomplete copy may have no state file
        other = run_of(files.cat_file(f"{target}/{STATE_FILE}"))
        if other not in ("", run) and run:
            raise FileExistsError(
                f"{target} is a copy of another run ({other}, this is {run}), and would be replaced. Give each run a "
                "folder of its own in learner.copy_to"
            )


def _remove_files(files: fsspec.AbstractFileSystem, target: str, manifest: bytes, but: Collection[str]) -> None:
    """Remove files that the old copy has and the new one does not, such as those of more ranks: they do not belong."""
    # The old manifest may be cut short by a crash, or foreign: then it names nothing, or files outside of the folder.
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        for name in map(PurePosixPath, json.loads(manifest)["files"]):
            outside = name.is_absolute() or ".." in name.parts
            if not outside and str(name) not in but and files.exists(f"{target}/{name}"):
                files.rm_file(f"{target}/{name}")
    files.rm_file(f"{target}/{MANIFEST}")


def main(*arguments: str) -> int:
    """Return the exit code; errors are printed as one line."""
    try:
        first, *others = arguments
        print(begin_copies(*others) if first == "--begin" else copy_checkpoint(Path(first), *others))
    except Exception as error:  # process boundary: each file system has errors of its own
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
