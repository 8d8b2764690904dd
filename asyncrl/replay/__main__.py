"""`python -m asyncrl.replay key=value ...`: the replay server of one run, until the run is over."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from asyncrl.checks.machine import check_machine
from asyncrl.config import JOURNAL_DIR, begin_trace, load_config
from asyncrl.digests import run_digest
from asyncrl.errors import AsyncRLError
from asyncrl.plain_text import make_streams_plain
from asyncrl.replay.audit.ledger_file import LEDGER_FILE, LedgerFile
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.net.keyring import with_keys
from asyncrl.replay.serving import run_server
from asyncrl.storage.log_stream import keep_logging
from asyncrl.storage.occupancy import lived_in
from asyncrl.utils.stopped_processes import watched_supervisors

EXIT_REFUSED = 2
"""Exit code when a restart cannot help. After any other code it can."""


def main(overrides: Sequence[str]) -> int:
    """Serve until the run is finished or a signal arrives.

    Raises:
        AsyncRLError: a refused setting, an address that cannot be bound, a damaged journal, or a broken ledger.
    """
    config = load_config(overrides)
    check_machine(config, "replay")
    begin_trace(config, "replay server")
    config = with_keys(config)
    keep_logging()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    with lived_in(config.run.dir), watched_supervisors():
        run_server(
            config.replay,
            AdmissionSettings.from_config(config),
            # Id of a new run. An existing journal keeps its id: peers of that run go on, others are refused.
            run_id=uuid.uuid4().hex[:12],
            run_digest=run_digest(config),
            seed=config.seed,
            ledger=LedgerFile(Path(config.run.dir) / LEDGER_FILE),
            folder=Path(config.run.dir) / JOURNAL_DIR,
            fresh=config.overwrite,
        )
    return 0


if __name__ == "__main__":
    make_streams_plain()
    try:
        sys.exit(main(sys.argv[1:]))
    except AsyncRLError as error:
        print(f"asyncrl.replay: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
