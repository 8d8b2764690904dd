"""Settings that the processes of a chaos run share, in one JSON file in its folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.net.keyring import run_keys
from asyncrl.settings.replay import JournalConfig, ReplayConfig
from asyncrl.types import StalePolicy

DIGEST = "chaos"
HEARTBEAT_S = 0.1
SILENCE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    folder: str
    address: str
    """Address that the peers connect to."""
    listen: str = ""
    """Address that the server listens at, if a relay is between; see `network.py`."""
    workers: int = 2
    groups_per_step: int = 4
    group_size: int = 2
    max_staleness: int = 2
    pipeline_depth: int = 1
    uses: int = 1
    """Number of steps that a group is trained in."""
    steps: int = 0
    """Steps to train. 0: until the file `stop` exists."""
    save_every: int = 3
    sync_delay_s: float = 0.0
    repeats: float = 0.1
    """Share of the groups that a worker sends twice."""
    slowest_s: float = 0.03
    """Seconds that the slowest groups take to generate."""
    heartbeat_s: float = HEARTBEAT_S
    silence_s: float = SILENCE_S
    mutant: str = ""
    failpoint: str = ""
    failpoint_count: int = 0

    @property
    def root(self) -> Path:
        return Path(self.folder)

    @property
    def full(self) -> Path:
        """While this file exists, the disk of the journal has no space left."""
        return self.root / "full"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    def save(self) -> None:
        (self.root / "chaos.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: str) -> ChaosSettings:
        return cls(**json.loads((Path(folder) / "chaos.json").read_text()))

    def replay(self) -> ReplayConfig:
        return ReplayConfig(
            address=self.address,
            keys=str(run_keys(self.root)),
            max_staleness=self.max_staleness,
            pipeline_depth=self.pipeline_depth,
            max_times_sampled=self.uses,
            heartbeat_s=self.heartbeat_s,
            heartbeat_timeout_s=self.silence_s,
            wait_timeout_s=120.0,
            journal=JournalConfig(retain="all", segment_mb=1),
        )

    def admission(self) -> AdmissionSettings:
        return AdmissionSettings(
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            max_staleness=self.max_staleness,
            pipeline_depth=self.pipeline_depth,
            max_times_sampled=self.uses,
            max_in_flight=64,
            stale_policy=StalePolicy.MASK,
            max_attempts=1000,
        )


class History:
    """What a client saw, one JSON line per event, written to the file at once. The oracle has no other source."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, what: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"what": what, **values}) + "\n").encode())
