"""`python -m asyncrl.rollout key=value …`: the pool of rollout workers, until the run is over. What `asyncrl local` and
`asyncrl rollout` start: they have looked at machine and rows.

`--worker` alone is internal: one worker, its spec as a line of JSON on standard input (see `pool.process_host`).
"""

from __future__ import annotations

import json
import os
import sys
import threading

from asyncrl.config import load_config
from asyncrl.errors import AsyncRLError
from asyncrl.family import die_with_parent
from asyncrl.plain_text import make_streams_plain
from asyncrl.rollout.host import EXIT_FAILED, EXIT_REFUSED, WorkerSpec, run_worker_here
from asyncrl.rollout.pool.pool import run_pool
from asyncrl.storage.log_stream import keep_logging
from asyncrl.telemetry.folder.resumed import kept_dtypes


def main(arguments: list[str]) -> int:
    """Exit code: that of the pool, or 2 with the reason when a setting was refused."""
    if arguments == ["--worker"]:
        die_with_parent(os.getppid())  # stopped, it would not see the pipe of a dead pool
        spec = _read_spec()
        threading.Thread(target=_exit_with_pool, daemon=True).start()
        code = run_worker_here(spec)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by return: that waits for every thread, and one that is stuck in an engine that died would keep this
        # process for ever, which its pool would take for a worker at work.
        os._exit(code)
    keep_logging()
    try:
        config = load_config(arguments)
        return run_pool(load_config([*arguments, *kept_dtypes(config, arguments)]))
    except AsyncRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_REFUSED


def _read_spec() -> WorkerSpec:
    line = bytearray()
    # Straight from the descriptor: a buffered reader would be locked by the thread below when the process ends.
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 16)
        if not data:
            sys.exit(EXIT_FAILED)
        line += data
    return WorkerSpec(**json.loads(line))


def _exit_with_pool() -> None:
    """waits for: the pool, for the life of the worker; unblocked by: its death, which closes the pipe."""
    while os.read(0, 1):
        pass
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    make_streams_plain()
    sys.exit(main(sys.argv[1:]))
