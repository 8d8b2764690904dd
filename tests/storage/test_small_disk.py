"""Every writer of the run folder on a file system that is really full: it names path and bytes, and leaves nothing
half written; with space it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.config import load_config
from asyncrl.errors import DiskFullError, WeightsError
from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
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
from asyncrl.storage.full_disk import make_board, read_board
from asyncrl.storage.lines import read_lines
from asyncrl.telemetry.folder.run_folder import prepare_run_folder
from asyncrl.telemetry.metrics.log import MetricsLog
from asyncrl.weights.files.sender import FilesSender
from asyncrl.weights.publishing.publisher import WeightPublisher
from tests.learner.feed import tiny_checkpoint
from tests.small_disk import SmallDisk, small_disk
from tests.waiting import until
from tests.weights.board import Board

CPU = torch.device("cpu")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "small", 8) as disk:
        (disk.root / "logs").mkdir()
        make_board(disk.root / "logs" / "waiting")
        yield disk


def metrics(disk: SmallDisk) -> Callable[[], None]:
    log = MetricsLog(disk.root, "run", {}, False, False, None)

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
    checkpoints = Checkpoints(disk.root / "ckpt", rank=0, keep=1)
    state = LearnerState(step=1, policy_version=2, skipped_steps=0)

    def write() -> None:
        path = checkpoints.save(state, roles, {"step": 1})
        sealed.verify(path)
        assert checkpoints.load(path, roles) == (state, {"step": 1})
        assert sorted(path.name for path in (disk.root / "ckpt").iterdir()) == ["latest", "step_2"]

    return write


def export(disk: SmallDisk) -> Callable[[], None]:
    model = policy(disk, disk.root.parent / "source")

    def write() -> None:
        export_hf(model, ModelConfig(path=str(disk.root.parent / "source")), disk.root / "hf", 0)
        sealed.verify(disk.root / "hf")

    return write


def best(disk: SmallDisk) -> Callable[[], None]:
    kept = BestCheckpoint(disk.root, "eval/heldout/accuracy")
    (disk.root / "step_2").mkdir(exist_ok=True)

    def write() -> None:
        assert kept.told(2, 0.5, (2, 2))
        found = read_best(disk.root)
        assert found is not None and found.value == 0.5 and (disk.root / BEST).readlink() == Path("step_2")

    return write


def weights_file(disk: SmallDisk) -> Callable[[], None]:
    sender = FilesSender(Board(), disk.root / "weights")
    publisher = WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=30)

    def write() -> None:
        publisher.publish(0, {"w": torch.ones(10_000)}.items())
        publisher.publish(1, {"w": torch.ones(10_000)}.items())
        publisher.close()
        assert len(list((disk.root / "weights").glob("v00000000-*.safetensors"))) == 1

    return write


def config(disk: SmallDisk) -> Callable[[], None]:
    config = load_config(["model.path=m", "data.path=d", "reward.function=r.py:f", f"run.dir={disk.root}/run"])

    def write() -> None:
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
def test_what_finds_no_space_says_so_and_is_written_when_there_is_some(name: str, disk: SmallDisk) -> None:
    write = WRITERS[name](disk)
    disk.fill()
    sentence = rf"the disk is full: .*{name}.* needs .* bytes.*resume=auto"
    # The weights are written by a thread, whose error says what it was sending.
    with pytest.raises(WeightsError if name == "v00000000" else DiskFullError, match=sentence):
        write()
    if name != "run/logs/waiting":  # which makes the board
        board = read_board(disk.root / "logs" / "waiting")
        assert re.match(sentence, board), "written where nothing else could be"
    disk.free()
    WRITERS[name](disk)()


def test_a_run_without_space_for_its_checkpoint_goes_on_from_the_one_before(disk: SmallDisk) -> None:
    model = policy(disk, disk.root.parent / "source")
    roles = Roles(policy=model, optimizer=make_optimizer(model.parameters(), LearnerConfig()))
    checkpoints = Checkpoints(disk.root / "ckpt", rank=0, keep=2)
    first = checkpoints.save(LearnerState(step=1, policy_version=2, skipped_steps=0), roles, {"step": 1})
    disk.fill()
    with pytest.raises(DiskFullError, match=r"step_3\.tmp needs .* bytes.*resume=auto"):
        checkpoints.save(LearnerState(step=2, policy_version=3, skipped_steps=0), roles, {"step": 2})
    disk.free()
    assert Checkpoints(disk.root / "ckpt", rank=0, keep=2).choose("auto", restarted=False) == first


def test_a_ledger_without_space_ends_the_server_and_is_completed_by_the_next(disk: SmallDisk) -> None:
    ledger = LedgerThread(LedgerFile(disk.root / "ledger.jsonl"))
    ledger(ev.Sealed(0, 0, 0, (0,)))
    ledger(ev.Trained(0, 1))
    ledger.close()
    before = (disk.root / "ledger.jsonl").read_bytes()
    disk.fill()
    full = LedgerThread(LedgerFile(disk.root / "ledger.jsonl"))
    for step in range(1, 200):
        full(ev.Sealed(step, step, 0, tuple(range(100))))
    full(ev.Trained(199, 200))
    with pytest.raises(DiskFullError, match=r"ledger\.jsonl needs"):
        full.close()
    assert (disk.root / "ledger.jsonl").read_bytes() == before, "no half of a line"


class PlainLog(SegmentLog):
    def _opening(self, end: int) -> Opening:
        return Opening([b"opening"], ())

    def append(self, data: bytes) -> None:
        self._append([data])


def test_a_journal_without_space_ends_its_server_with_path_and_bytes_and_loses_nothing(disk: SmallDisk) -> None:
    folder = disk.root / "journal"
    log = PlainLog(FolderDisk(folder, locked=True), JournalSettings(segment_bytes=1 << 16))
    sync = SyncThread(log, 0.001, folder)
    log.append(b"kept")
    sync.nudge()
    until(lambda: log.durable == log.promised)
    durable = log.durable
    disk.fill()
    for _ in range(4):
        log.append(bytes(1 << 15))
    sync.nudge()
    until(lambda: sync.failure is not None)
    with pytest.raises(DiskFullError, match=r"\.seg needs .* bytes .*resume=auto"):
        sync.heard()
    assert log.durable == durable, "nothing that is not durable is acknowledged"
    disk.free()
    sync.stop()


def test_json_of_the_ledger_stays_plain(disk: SmallDisk) -> None:
    ledger = LedgerFile(disk.root / "ledger.jsonl")
    ledger(ev.Published(0, -1))
    ledger(ev.Finished())
    rows = [json.loads(line) for line in (disk.root / "ledger.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["published", "finished"]
