"""A second copy of a checkpoint, behind any URL of fsspec: `python -m asyncrl.storage.second_copy STEP_DIR URL`.

URL/step_50/   the files of ckpt/step_50, manifest.json last: a copy without it is half a one
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fsspec

from asyncrl.storage.sealed import MANIFEST


def copy_checkpoint(checkpoint: Path, url: str) -> str:
    """Put `checkpoint` under `url`; one of the same name that lies there is replaced. Nothing there is ever deleted.

    Returns:
        Where it is now.

    Raises:
        OSError, ValueError, ImportError: as of fsspec: no such protocol, no right, a file that arrived cut short.
    """
    files, root = fsspec.core.url_to_fs(url)
    target = f"{root.rstrip('/')}/{checkpoint.name}"
    files.makedirs(target, exist_ok=True)
    if files.exists(f"{target}/{MANIFEST}"):
        files.rm_file(f"{target}/{MANIFEST}")
    names = [*json.loads((checkpoint / MANIFEST).read_text())["files"], MANIFEST]
    for name in names:
        files.put_file(str(checkpoint / name), f"{target}/{name}")
        there, here = files.size(f"{target}/{name}"), (checkpoint / name).stat().st_size
        if there != here:
            raise OSError(f"{target}/{name} has {there} bytes of {here}")
    return target


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
