"""`python -m asyncrl.replay.shards N key=value ...`: shard number N of a run's payloads, until the run is over. Its
journal is `journal/shard-N` in the run folder."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.checks.machine import check_machine
from asyncrl.config import JOURNAL_DIR, disk_patience
from asyncrl.digests import run_digest
from asyncrl.errors import AsyncRLError
from asyncrl.plain_text import make_streams_plain
from asyncrl.replay.net.keyring import with_keys
from asyncrl.replay.shards.running import run_shard, shard_config
from asyncrl.replay.shards.store import shard_folder
from asyncrl.storage.log_stream import keep_logging
from asyncrl.storage.occupancy import lived_in
from asyncrl.utils.stopped_processes import watched_supervisors

EXIT_REFUSED = 2
"""Exit code when a restart cannot help. After any other code it can."""


def main(arguments: Sequence[str]) -> int:
    """Serve until the run is finished or a signal arrives.

    Raises:
        AsyncRLError: a refused setting, an address that cannot be bound, a damaged journal, or no planner.
    """
    number, config = shard_config(arguments)
    check_machine(config, "replay")
    config = with_keys(config)
    keep_logging()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    folder = shard_folder(Path(config.run.dir) / JOURNAL_DIR, number)
    with lived_in(config.run.dir), watched_supervisors():
        run_shard(
            config.replay,
            number,
            run_digest(config),
            folder=folder,
            fresh=config.overwrite,
            patience=disk_patience(config),
        )
    return 0


if __name__ == "__main__":
    make_streams_plain()
    try:
        sys.exit(main(sys.argv[1:]))
    except AsyncRLError as error:
        print(f"asyncrl.replay.shards: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
