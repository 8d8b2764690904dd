"""A second copy of a checkpoint, behind any URL of fsspec: `python -m asyncrl.storage.second_copy STEP_DIR URL`.

URL/step_50/   the files of ckpt/step_50, manifest.json last: a copy without it is half a one
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import fsspec

from asyncrl.storage.sealed import MANIFEST


def copy_checkpoint(checkpoint: Path, url: str) -> str:
    """Put `checkpoint` under `url`; another of the same name that lies there is replaced, the same one left as it is.
    Beside that nothing there is ever deleted.

    Returns:
        Where it is now.

    Raises:
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
        _remove_files(files, target, there, names)
    for name in names:
        files.put_file(str(checkpoint / name), f"{target}/{name}")
        there, here = files.size(f"{target}/{name}"), (checkpoint / name).stat().st_size
        if there != here:
            raise OSError(f"{target}/{name} has {there} bytes of {here}")
    return target


def _remove_files(files: fsspec.AbstractFileSystem, target: str, manifest: bytes, but: Collection[str]) -> None:
    """What the old copy names and the new one has not (files of more ranks): beside it they would be in excess."""
    # Cut short by a death, or of another hand: then it names nothing, or what is not in the folder.
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        for name in map(PurePosixPath, json.loads(manifest)["files"]):
            outside = name.is_absolute() or ".." in name.parts
            if not outside and str(name) not in but and files.exists(f"{target}/{name}"):
                files.rm_file(f"{target}/{name}")
    files.rm_file(f"{target}/{MANIFEST}")


def main(checkpoint: str, url: str) -> int:
    """Exit code; what is wrong as one line."""
    try:
        print(copy_checkpoint(Path(checkpoint), url))
    except Exception as error:  # process boundary: each file system has errors of its own
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
