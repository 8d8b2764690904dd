"""Run a real shard on a disk that can lose power, optionally with one planted mistake (`settings.mutant`)."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

from asyncrl.errors import AsyncRLError
from asyncrl.replay.shards.running import run_shard

from .power import Failpoint, PowerDisk
from .server import ack_before_fsync
from .settings import DIGEST, ChaosSettings


def main() -> None:
    settings, number = ChaosSettings.load(sys.argv[1]), int(sys.argv[2].partition("-")[2])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if settings.mutant == "shard_ack_before_fsync":
        ack_before_fsync()
    disk = PowerDisk(settings.shard_journal(number), settings.sync_delay_s, Failpoint("", 0), settings.full)
    config = replace(settings.replay(), shard_address=settings.shards[number])
    try:
        run_shard(config, number, DIGEST, disk=disk)
    except AsyncRLError as error:
        print(f"shard {number}: {type(error).__name__}: {error}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
