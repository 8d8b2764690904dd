from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.storage.lines import read_lines
from asyncrl.telemetry.metrics.log import MetricsLog
from tests.cli.processes.test_supervisor import until


def open_log(folder: Path, resume_step: int | None = None, **sinks: bool) -> MetricsLog:
    options = {"wandb": False, "tensorboard": False, **sinks}
    return MetricsLog(folder, "run", {"seed": 0}, resume_step=resume_step, **options)


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, object]]:
    return read_lines(folder / name).rows


def test_a_row_is_on_disk_before_the_log_is_closed(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.write(1, 1, {"reward/mean": 0.5})
    assert rows(tmp_path)[0]["reward/mean"] == 0.5
    assert rows(tmp_path)[0]["step"] == rows(tmp_path)[0]["policy_version"] == 1
    log.close()


def test_values_that_json_cannot_say_become_null(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.write(1, 1, {"a": math.nan, "b": math.inf, "c": np.float32(0.25), "d": np.int64(3), "e": 7})
    log.close()
    row = rows(tmp_path)[0]
    assert [row[name] for name in "abcde"] == [None, None, 0.25, 3.0, 7]


def test_parts_of_rewards_beyond_so_many_names_are_left_out_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(tmp_path)
    for step in range(1, 101):
        log.write(step, step, {"reward/mean": 0.5, f"rewards/id_{step}": 1.0, "rewards/format": 0.25})
    log.close()
    written = rows(tmp_path)
    assert len({name for row in written for name in row if name.startswith("rewards/")}) == 64
    assert all(row["reward/mean"] == 0.5 and row["rewards/format"] == 0.25 for row in written)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and said[0].startswith("id_64 and other parts of rewards are left out of the metrics")


def test_a_resume_drops_the_rows_of_the_history_that_was_rolled_back(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for step in range(1, 6):
        log.write(step, step, {"x": step})
        log.samples(step, [{"prompt": "p", "reward": step}])
    log.close()
    resumed = open_log(tmp_path, resume_step=3)
    resumed.write(4, 9, {"x": 40})
    resumed.close()
    assert [(row["step"], row["x"]) for row in rows(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert [row["step"] for row in rows(tmp_path, "samples.jsonl")] == [1, 2, 3]


def test_a_line_cut_off_by_a_kill_is_dropped_on_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    open_log(tmp_path, resume_step=5).close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_a_fresh_start_after_a_crash_before_the_first_checkpoint_begins_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    open_log(tmp_path, resume_step=None).close()
    assert rows(tmp_path) == []


def test_samples_keep_their_text(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.samples(2, [{"prompt": "ab>", "completion": "ü\n", "reward": 1.0}])
    log.samples(1, [{"row": 0, "reward": 0.0}], "held")
    log.close()
    assert rows(tmp_path, "eval_samples.jsonl") == [{"step": 1, "eval_set": "held", "row": 0, "reward": 0.0}]
    assert rows(tmp_path, "samples.jsonl") == [{"step": 2, "prompt": "ab>", "completion": "ü\n", "reward": 1.0}]


@pytest.mark.parametrize("sink", ["wandb", "tensorboard"])
def test_a_sink_that_is_not_installed_names_its_extra(
    sink: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigError, match=rf"asyncrl\[{sink}\]"):
        open_log(tmp_path, **{sink: True})


def rows_of(stored: Path) -> list[dict[str, Any]]:
    """What wandb would send: its file is a log as LevelDB's, in blocks of 32 KiB, whose records may be cut."""
    record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    data, at, part, found = stored.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part of one
            each, part = record.FromString(part), b""
            items = each.history.item if each.HasField("history") else ()
            found += [{"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in items}]
    return [row for row in found if row]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_wandb_gets_the_same_rows_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = open_log(tmp_path, wandb=True)
    log.write(1, 1, {"reward/mean": 0.5})
    log.write(0, 0, {"eval/heldout/reward": 0.75})  # late, and not refused
    log.write(2, 2, {"reward/mean": 0.25})
    log.write(1, 3, {"reward/mean": 0.75})
    sample = {"prompt": "p", "reward": 0.5, "rewards": {"a": 0.5}, "version_min": 3, "version_max": 4}
    log.samples(1, [sample | {"segments": [["learned", "ab"], ["read", "c"]], "staleness_min": 0, "staleness_max": 0}])
    log.samples(0, [{"prompt": "q", "failed": "why"}], "heldout")
    log.close()
    (stored,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    until(lambda: len(rows_of(stored)) == 6)  # its process writes on when `finish` has come back
    kept = rows_of(stored)
    rewards = [(row["step"], row["reward/mean"]) for row in kept if "reward/mean" in row]
    assert rewards == [(1, 0.5), (2, 0.25), (1, 0.75)]
    assert [(row["step"], row["eval/heldout/reward"]) for row in kept if "eval/heldout/reward" in row] == [(0, 0.75)]
    assert sorted(row["_step"] for row in kept) == list(range(6))
    tables = [json.loads(file.read_text()) for file in tmp_path.glob("wandb/offline-run-*/files/media/**/*.table.json")]
    assert sorted(table["data"] for table in tables) == [
        [["p", "ab[read: c]", "0.5", "a 0.5", "3 to 4", "0", "", ""]],
        [["q", "", "", "", "", "", "", "why"]],
    ]


HISTOGRAM = {"histogram/reward": ([0.0, 0.5, 1.0], [3.0, 1.0])}


def test_histograms_stand_in_a_file_of_their_own_and_go_back_with_the_rows(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for step in (1, 2, 3):
        log.histograms(step, HISTOGRAM)
    log.close()
    open_log(tmp_path, resume_step=2).close()
    written = rows(tmp_path, "histograms.jsonl")
    assert [row["step"] for row in written] == [1, 2]
    assert written[0]["histogram/reward"] == {"edges": [0.0, 0.5, 1.0], "counts": [3.0, 1.0]}


def test_what_a_resume_rolls_back_is_told_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Package:
        @staticmethod
        def SummaryWriter(folder: str, purge_step: int) -> Any:
            asked.append(purge_step)

    monkeypatch.setattr("importlib.import_module", lambda name: Package)
    for resumed in (None, 3):
        open_log(tmp_path, resume_step=resumed, tensorboard=True)
    assert asked == [0, 4]


def test_sinks_get_histograms_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against stand-ins that take what the packages take: neither has to be installed."""
    calls: list[tuple[str, dict[str, Any]]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None: ...

        def add_histogram_raw(self, name: str, **given: Any) -> None:
            calls.append((name, given))

        def close(self) -> None: ...

    class Package:
        SummaryWriter = Writer

        @staticmethod
        def Histogram(np_histogram: tuple[list[float], list[float]]) -> tuple[list[float], list[float]]:
            return np_histogram

        @staticmethod
        def init(**given: Any) -> Any:
            return Package

        @staticmethod
        def define_metric(name: str, step_metric: str) -> None: ...

        @staticmethod
        def log(row: dict[str, Any]) -> None:
            """Not for a step of W&B's count: those that a resume trains again would be dropped."""
            calls.append(("wandb", row))

        @staticmethod
        def finish() -> None: ...

    monkeypatch.setattr("importlib.import_module", lambda name: Package)
    log = open_log(tmp_path, wandb=True, tensorboard=True)
    log.histograms(4, HISTOGRAM)
    log.close()
    assert calls[0] == ("wandb", {"histogram/reward": ([3.0, 1.0], [0.0, 0.5, 1.0]), "step": 4})
    name, given = calls[1]
    assert name == "histogram/reward" and given["global_step"] == 4
    assert (given["bucket_limits"], given["bucket_counts"]) == ([0.5, 1.0], [3.0, 1.0])
    assert (given["num"], given["sum"], given["sum_squares"]) == (4.0, 1.5, 3 * 0.0625 + 0.5625)
