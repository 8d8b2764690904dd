"""`python -m asyncrl.replay key=value ...`: the replay server of one run, until the run is over."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config import JOURNAL_DIR, load_config, run_digest
from asyncrl.errors import AsyncRLError
from asyncrl.machine import check_machine
from asyncrl.replay.admission import AdmissionSettings
from asyncrl.replay.history import LEDGER_FILE, LedgerFile
from asyncrl.replay.serving import run_server

EXIT_REFUSED = 2
"""A restart cannot help; whatever else ends the process by itself, it can."""


def main(overrides: Sequence[str]) -> int:
    """Serve until the run is finished or a signal comes.

    Raises:
        AsyncRLError: a refused setting, an address that cannot be bound, a damaged journal, or a broken ledger.
    """
    config = load_config(overrides)
    check_machine(config, "replay")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    run_server(
        config.replay,
        AdmissionSettings.from_config(config),
        # Of a new run. A journal that is there keeps its id, and peers of that run go on; others are refused.
        run_id=uuid.uuid4().hex[:12],
        run_digest=run_digest(config),
        seed=config.seed,
        ledger=LedgerFile(Path(config.run.dir) / LEDGER_FILE),
        folder=Path(config.run.dir) / JOURNAL_DIR,
        fresh=config.overwrite,
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AsyncRLError as error:
        print(f"asyncrl.replay: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
