"""Keys for servers and clients of tests and benchmarks, made once per process."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from asyncrl.replay.net.keyring import make_keys


@functools.cache
def some_keys() -> str:
    """Return a folder for `replay.keys`. It is deleted when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-keys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_keys(folder)
    return str(folder)
