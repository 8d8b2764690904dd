"""Every writer of the run folder on a file system that is really full: it waits, names the path, and continues."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl.config import load_config
from asyncrl.errors import DiskFullError
from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
from asyncrl.learner.checkpoints.errands import Errands
from asyncrl.learner.checkpoints.export import export_hf
from asyncrl.learner.model.policy import build_model
from asyncrl.learner.optimizer.update import make_optimizer
from asyncrl.learner.roles import Roles
from asyncrl.replay.audit.ledger_file import LedgerFile, LedgerThread
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.journal.disk import FolderDisk
from asyncrl.replay.journal.log import JournalSettings, Opening, SegmentLog
from asyncrl.replay.journal.sync_thread import SyncThread
from asyncrl.schema import Config, LearnerConfig, ModelConfig
from asyncrl.storage import sealed
from asyncrl.storage.best import BEST, BestCheckpoint, read_best
from asyncrl.storage.checkpoints import finished
from asyncrl.storage.full_disk import Patience, make_board, read_board
from asyncrl.storage.lines import read_lines
from asyncrl.telemetry.folder.run_folder import prepare_run_folder
from asyncrl.telemetry.metrics.log import MetricsLog
from asyncrl.weights.files.sender import FilesSender
from asyncrl.weights.publishing.snapshot import BackgroundPublisher
from tests.learner.feed import tiny_checkpoint
from tests.small_disk import SmallDisk, small_disk
from tests.waiting import until
from tests.weights.board import Board

CPU = torch.device("cpu")
TURNS = 3
"""Of waiting, before there is space."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "small", 8) as disk:
        make_board(disk.root / "waiting")
        yield disk


def patience(disk: SmallDisk, turns: int = TURNS, limit_s: float = 3600) -> Patience:
    """Makes room after so many waits."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == turns:
            disk.free()

    return Patience(limit_s, disk.root / "waiting", sleep=sleep, clock=lambda: sum(slept))


def metrics(disk: SmallDisk) -> Callable[[], None]:
    log = MetricsLog(disk.root, "run", {}, False, False, None, patience(disk))

    def write() -> None:
        log.write(1, 1, {"x": 1.0})
        log.samples(1, [{"prompt": "p" * 5000}])
        log.close()
        assert [row["step"] for row in read_lines(disk.root / "metrics.jsonl").rows] == [1]
        assert len(read_lines(disk.root / "samples.jsonl").rows[0]["prompt"]) == 5000

    return write


def policy(disk: SmallDisk, source: Path):
    return build_model(Config(model=ModelConfig(path=str(tiny_checkpoint(source)))), CPU, None)


def checkpoint(disk: SmallDisk) -> Callable[[], None]:
    model = policy(disk, disk.root.parent / "source")
    roles = Roles(policy=model, optimizer=make_optimizer(model.parameters(), LearnerConfig()))
    checkpoints = Checkpoints(disk.root / "ckpt", rank=0, keep=1, patience=patience(disk))
    state = LearnerState(step=1, policy_version=2, skipped_steps=0)

    def write() -> None:
        path = checkpoints.save(state, roles, {"step": 1})
        sealed.verify(path)
        assert checkpoints.load(path, roles) == (state, {"step": 1})
        assert sorted(path.name for path in (disk.root / "ckpt").iterdir()) == ["latest", "step_2"]

    return write


def export(disk: SmallDisk) -> Callable[[], None]:
    model = policy(disk, disk.root.parent / "source")

    def gives_back() -> None:
        assert not (disk.root / "hf.tmp").exists(), "a run would wait for the space that its export has"

    def write() -> None:
        waiting = patience(disk)
        waits = replace(waiting, sleep=lambda s: (waiting.sleep(s), gives_back()))
        export_hf(model, ModelConfig(path=str(disk.root.parent / "source")), disk.root / "hf", 0, waits)
        sealed.verify(disk.root / "hf")

    return write


def best(disk: SmallDisk) -> Callable[[], None]:
    kept = BestCheckpoint(disk.root, "eval/heldout/accuracy", patience=patience(disk))
    (disk.root / "step_2").mkdir()

    def write() -> None:
        assert kept.told(2, 0.5, (2, 2))
        found = read_best(disk.root)
        assert found is not None and found.value == 0.5 and (disk.root / BEST).readlink() == Path("step_2")

    return write


def weights_file(disk: SmallDisk) -> Callable[[], None]:
    sender = FilesSender(Board(), disk.root / "weights", patience=patience(disk))
    publisher = BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=30)

    def write() -> None:
        publisher.publish(0, {"w": torch.ones(10_000)}.items())
        publisher.publish(1, {"w": torch.ones(10_000)}.items())
        publisher.close()
        assert len(list((disk.root / "weights").glob("v00000000-*.safetensors"))) == 1

    return write


def config(disk: SmallDisk) -> Callable[[], None]:
    config = load_config(
        ["model.path=m", "data.path=d", "reward.function=r.py:f", f"run.dir={disk.root}/run", "run.disk_patience_s=60"]
    )

    def write() -> None:
        # The real clock: the settings make the patience.
        threading.Timer(0.5, disk.free).start()
        prepare_run_folder(config, "one")
        assert "seed" in (disk.root / "run" / "config.yaml").read_text()

    return write


WRITERS = {
    "metrics.jsonl": metrics,
    "ckpt/step_2.tmp": checkpoint,
    "hf": export,
    "best.json": best,
    "v00000000": weights_file,
    "run/logs/waiting": config,
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_finds_no_space_is_written_when_there_is_some(
    name: str, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    write = WRITERS[name](disk)
    disk.fill()
    write()
    said = [record.getMessage() for record in caplog.records if "the disk is full" in record.getMessage()]
    assert said and name in said[0] and " needs " in said[0] and "bytes" in said[0]
    assert "going on" in caplog.text


def test_a_run_without_space_for_its_checkpoint_ends_resumable_when_its_patience_is_over(disk: SmallDisk) -> None:
    model = policy(disk, disk.root.parent / "source")
    roles = Roles(policy=model, optimizer=make_optimizer(model.parameters(), LearnerConfig()))
    waiting = patience(disk, turns=10**9, limit_s=200)
    checkpoints = Checkpoints(disk.root / "ckpt", rank=0, keep=2, patience=waiting)
    first = checkpoints.save(LearnerState(step=1, policy_version=2, skipped_steps=0), roles, {"step": 1})
    disk.fill()
    with pytest.raises(DiskFullError, match=r"step_3\.tmp needs .* bytes.*resume=auto"):
        checkpoints.save(LearnerState(step=2, policy_version=3, skipped_steps=0), roles, {"step": 2})
    assert "resume=auto" in read_board(disk.root / "waiting")  # written where nothing else could be
    disk.free()
    assert Checkpoints(disk.root / "ckpt", rank=0, keep=2).choose("auto", restarted=False) == first


def test_a_checkpoint_that_finds_no_space_takes_that_of_those_that_were_kept_for_their_copies(disk: SmallDisk) -> None:
    """A save that waits for space makes none: old ones go with the next that is whole."""
    model = policy(disk, disk.root.parent / "source")
    roles = Roles(policy=model, optimizer=make_optimizer(model.parameters(), LearnerConfig()))
    copied = Copied()
    waiting = patience(disk, turns=10**9, limit_s=200)
    checkpoints = Checkpoints(disk.root / "ckpt", rank=0, keep=1, patience=waiting, errands=copied)
    for step in (1, 2, 3):
        checkpoints.save(LearnerState(step=step, policy_version=step, skipped_steps=0), roles, {})
    assert [path.name for path in finished(disk.root / "ckpt")] == ["step_2", "step_3", "step_4"]
    copied.under_way.clear()
    disk.fill()
    sealed.verify(checkpoints.save(LearnerState(step=4, policy_version=4, skipped_steps=0), roles, {}))
    assert [path.name for path in finished(disk.root / "ckpt")] == ["step_5"]


class Copied(Errands):
    """To a far disk that is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = {"step_2", "step_3"}

    def needed(self) -> set[str]:
        return self.under_way


def test_the_ledger_waits_for_space_on_its_thread_and_ends_the_server_only_when_the_patience_is_over(
    disk: SmallDisk,
) -> None:
    now, frees_at = [0.0], 50.0

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= frees_at:
            disk.free()

    ledger = LedgerThread(LedgerFile(disk.root / "ledger.jsonl", Patience(100, None, lambda: now[0], sleep)))
    disk.fill()
    for step in range(60):
        ledger(ev.Sealed(step, step, 0, (step,)))
        ledger(ev.Trained(step, step + 1))
    ledger.close()
    found = read_lines(disk.root / "ledger.jsonl")
    assert [row["step"] for row in found.rows if row["event"] == "trained"] == list(range(60)) and not found.damaged
    assert now[0] >= frees_at
    frees_at = math.inf
    disk.fill()
    again = LedgerThread(LedgerFile(disk.root / "ledger.jsonl", Patience(100, None, lambda: now[0], sleep)))
    for step in range(60, 200):
        again(ev.Sealed(step, step, 0, tuple(range(100))))
    again(ev.Trained(199, 200))
    with pytest.raises(DiskFullError, match=r"ledger\.jsonl needs"):
        again.close()


class PlainLog(SegmentLog):
    def _opening(self, end: int) -> Opening:
        return Opening([b"opening"], ())

    def append(self, data: bytes) -> None:
        self._append([data])


def test_the_journal_names_path_and_bytes_goes_on_and_ends_its_server_when_the_patience_is_over(
    disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    folder = disk.root / "journal"
    log = PlainLog(FolderDisk(folder, locked=True), JournalSettings(segment_bytes=1 << 16))
    now = [0.0]
    sync = SyncThread(log, 0.001, Patience(100, None, clock=lambda: now[0]), folder)

    def fill_journal() -> None:
        disk.fill()
        for _ in range(4):
            log.append(bytes(1 << 15))
        sync.nudge()
        until(lambda: bool(log.problem))

    fill_journal()
    assert f"{folder}/0000000" in caplog.text and "bytes are free" not in caplog.text
    disk.free()
    until(lambda: log.durable == log.promised)
    assert not log.problem
    fill_journal()
    now[0] += 100
    until(lambda: sync.failure is not None)
    with pytest.raises(DiskFullError, match=r"\.seg needs .* bytes .*resume=auto"):
        sync.heard()
    disk.free()
    sync.stop()


def test_json_of_the_ledger_stays_plain(disk: SmallDisk) -> None:
    ledger = LedgerFile(disk.root / "ledger.jsonl")
    ledger(ev.Published(0, -1))
    ledger(ev.Finished())
    rows = [json.loads(line) for line in (disk.root / "ledger.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["published", "finished"]
