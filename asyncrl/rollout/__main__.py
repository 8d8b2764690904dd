"""`python -m asyncrl.rollout key=value …`: the pool of rollout workers, until the run is over. Started by `asyncrl
local` and `asyncrl rollout`, which have checked machine and rows.

`--worker` alone is internal: one worker, with its spec as a line of JSON on standard input (`pool.process_host`).
"""

from __future__ import annotations

import json
import os
import sys
import threading

from asyncrl.config import load_config
from asyncrl.errors import AsyncRLError
from asyncrl.plain_text import make_streams_plain
from asyncrl.rollout.host import EXIT_FAILED, EXIT_REFUSED, WorkerSpec, run_worker_here
from asyncrl.rollout.pool.pool import run_pool
from asyncrl.storage.log_stream import keep_logging
from asyncrl.telemetry.folder.resumed import load_as_begun
from asyncrl.utils.process_tree import die_with_parent


def main(arguments: list[str]) -> int:
    """Return the exit code: the pool's, or 2 with the reason if a setting was refused."""
    if arguments == ["--worker"]:
        die_with_parent(os.getppid())  # a stopped worker would not notice the closed pipe of a dead pool
        spec = _read_spec()
        threading.Thread(target=_exit_with_pool, daemon=True).start()
        code = run_worker_here(spec)
        sys.stdout.flush()
        sys.stderr.flush()
        # `return` would wait for every thread. One that is stuck in a dead engine would keep this process alive for
        # ever, and its pool would take it for a working worker.
        os._exit(code)
    keep_logging()
    try:
        return run_pool(load_as_begun(load_config, arguments)[0])
    except AsyncRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_REFUSED


def _read_spec() -> WorkerSpec:
    line = bytearray()
    # Straight from the descriptor: the thread below would hold the lock of a buffered reader when the process ends.
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 16)
        if not data:
            sys.exit(EXIT_FAILED)
        line += data
    return WorkerSpec(**json.loads(line))


def _exit_with_pool() -> None:
    """waits for: the pool, for the lifetime of the worker; unblocked by: its death, which closes the pipe."""
    while os.read(0, 1):
        pass
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    make_streams_plain()
    sys.exit(main(sys.argv[1:]))
