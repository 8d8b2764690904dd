"""A second copy of a checkpoint, behind any URL of fsspec: `python -m asyncrl.storage.second_copy STEP_DIR URL`.

URL/step_50/   the files of ckpt/step_50, manifest.json last: a copy without it is half a one

And before there is one, `python -m asyncrl.storage.second_copy --begin RUN URL`: whether that run may copy to there.
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
    """See that files may be written under `url`, and that no checkpoints of another run than `run` lie there.

    Returns:
        Where they will be.

    Raises:
        FileExistsError: some do. OSError, ValueError, ImportError: as of fsspec: no such protocol, no right.
    """
    files, root = fsspec.core.url_to_fs(url)
    root = root.rstrip("/")
    files.makedirs(root, exist_ok=True)
    files.pipe_file(f"{root}/{PROBE}", b"x")
    with contextlib.suppress(Exception):  # a place of backups may allow nobody to delete: then it stays there
        files.rm_file(f"{root}/{PROBE}")
    for path in sorted(str(found) for found in files.ls(root, detail=False)):
        if path.rpartition("/")[2].startswith("step_"):
            _refuse_other(files, path, run)
    return root


def copy_checkpoint(checkpoint: Path, url: str) -> str:
    """Put `checkpoint` under `url`; another of the same name and run that lies there is replaced, the same one left as
    it is. Beside that nothing there is ever deleted.

    Returns:
        Where it is now.

    Raises:
        FileExistsError: one of another run lies there.
        OSError, ValueError, ImportError: as of fsspec: no such protocol, no right, a file that arrived cut short.
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
    with contextlib.suppress(FileNotFoundError):  # half a copy may have none
        other = run_of(files.cat_file(f"{target}/{STATE_FILE}"))
        if other not in ("", run) and run:
            raise FileExistsError(
                f"{target} is a copy of another run ({other}, this is {run}), and would be replaced. Give each run a "
                "folder of its own in learner.copy_to"
            )


def _remove_files(files: fsspec.AbstractFileSystem, target: str, manifest: bytes, but: Collection[str]) -> None:
    """What the old copy names and the new one has not (files of more ranks): beside it they would be in excess."""
    # Cut short by a death, or of another hand: then it names nothing, or what is not in the folder.
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        for name in map(PurePosixPath, json.loads(manifest)["files"]):
            outside = name.is_absolute() or ".." in name.parts
            if not outside and str(name) not in but and files.exists(f"{target}/{name}"):
                files.rm_file(f"{target}/{name}")
    files.rm_file(f"{target}/{MANIFEST}")


def main(*arguments: str) -> int:
    """Exit code; what is wrong as one line."""
    try:
        first, *others = arguments
        print(begin_copies(*others) if first == "--begin" else copy_checkpoint(Path(first), *others))
    except Exception as error:  # process boundary: each file system has errors of its own
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
