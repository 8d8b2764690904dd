"""Copies and exports of durable checkpoints beside training: failures are reported, and training goes on."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from asyncrl.cli.export import chosen_checkpoint
from asyncrl.config import load_config
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.assembly import Kept, open_checkpoints
from asyncrl.learner.checkpoints.checkpoint import Checkpoints
from asyncrl.learner.checkpoints.errands import Errand, Errands
from asyncrl.learner.parallel.place import Place
from asyncrl.storage import sealed
from asyncrl.storage.full_disk import make_board, read_board
from asyncrl.storage.second_copy import begin_copies, copy_checkpoint
from asyncrl.utils.process_tree import is_alive, process_at
from tests.learner.checkpoints.test_checkpoint import learner, state
from tests.refusals import REQUIRED
from tests.waiting import until


def quick(**settings) -> Errands:
    return Errands(sleep=lambda _: None, **settings)


def errand(code: str, folder: Path) -> Errand:
    return Errand(kind="copies", what="the copy", checkpoint=folder / "step_1", arguments=("-S", "-c", code))


def test_what_fails_is_tried_again_said_and_counted_and_what_hangs_is_ended(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    errands, tried = quick(within_s=20.0), tmp_path / "tried"
    second = f"import os, sys; os.path.exists({str(tried)!r}) or (open({str(tried)!r}, 'w'), sys.exit('no such host'))"
    errands.send([errand(second, tmp_path), errand("raise SystemExit('no right')", tmp_path)])
    assert errands.needed() == {"step_1"}, "it must not be deleted meanwhile"
    errands.finish(120.0)
    assert errands.needed() == set()
    assert errands.counts() == {"checkpoint/copies": 1.0, "checkpoint/copies_failed": 1.0}
    assert "(try 1 of 3), training goes on: no such host" in caplog.text
    assert "(try 3 of 3), training goes on: no right" in caplog.text
    with pytest.raises(ConfigError, match=r"learner\.copy_to=nosuch://x is not a URL that fsspec can open"):
        quick(copy_to="nosuch://x")
    hanging = quick(within_s=0.3)
    hanging.send([errand("import time; time.sleep(600)", tmp_path)])
    hanging.finish(60.0)
    assert hanging.counts()["checkpoint/copies_failed"] == 1.0
    assert "took longer than 0.3 s (learner.save_timeout_s)" in caplog.text


def test_a_copy_goes_before_exports_that_wait_and_one_whose_turn_never_came_is_said_with_what_was_under_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    errands, done, go = quick(), tmp_path / "done", tmp_path / "go"

    def named(kind: str, what: str, waits: bool = False) -> Errand:
        until = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n" if waits else ""
        code = f"{until}open({str(done)!r}, 'a').write({what!r} + ' ')"
        return Errand(kind=kind, what=what, checkpoint=tmp_path / "step_1", arguments=("-S", "-c", code))

    errands.send([named("exports", "export-1", waits=True), named("exports", "export-2")])
    errands.send([named("copies", "copy-2")])
    errands.send([named("copies", "copy-3"), named("exports", "export-3")])
    go.write_text("")
    errands.finish(120.0)
    assert done.read_text().split() == ["export-1", "copy-3", "export-2", "export-3"]
    assert "copy-2 is skipped: a newer one is due, and export-1 is still running" in caplog.text
    assert errands.counts()["checkpoint/copies_failed"] == 1.0


def test_exports_slower_than_saves_keep_few_checkpoints_and_those_left_out_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    done, go, board = tmp_path / "done", tmp_path / "go", tmp_path / "waiting"
    make_board(board)

    def export(checkpoint: Path, steps: int) -> Errand:
        code = f"import os, time\nif not {steps}: raise SystemExit('no')\n"
        code += f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        code += f"open({str(done)!r}, 'a').write('{steps} ')"
        return Errand(kind="exports", what=f"export {steps}", checkpoint=checkpoint, arguments=("-S", "-c", code))

    monkeypatch.setattr("asyncrl.learner.checkpoints.errands._export", export)
    errands = quick(export_every=1, board=board)
    errands.saved(tmp_path / "step_0", 0)  # fails, which is counted as well
    errands.finish(120.0)
    for steps in range(1, 4):
        errands.saved(tmp_path / f"step_{steps}", steps)
    assert "is skipped" not in caplog.text and errands.needed() == {"step_1", "step_2", "step_3"}
    errands.saved(tmp_path / "step_4", 4)
    assert "export 2 is skipped" in caplog.text
    assert "export 2 is skipped: a newer one is due, and export 1 is still" in read_board(board)
    assert "learner.export_every" in read_board(board)
    for steps in range(5, 9):
        errands.saved(tmp_path / f"step_{steps}", steps)
    assert errands.needed() == {"step_1", "step_7", "step_8"}
    go.write_text("")
    errands.finish(120.0)
    assert done.read_text().split() == ["1", "7", "8"], "the last one is made in any case"
    assert errands.counts() == {"checkpoint/exports": 3.0, "checkpoint/exports_failed": 6.0}
    assert read_board(board).startswith("the end of the run waits for export 1; export 7; export 8, at most 120 s")


def test_a_checkpoint_kept_for_an_errand_is_deleted_once_that_is_done(tmp_path: Path):
    folder, go = tmp_path / "run" / "ckpt", tmp_path / "go"
    errands = quick()
    saves = Checkpoints(folder, rank=0, keep=1, errands=errands)
    path = saves.save(state(1), learner(0, updates=1), {})
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    errands.send([Errand(kind="exports", what="export", checkpoint=path, arguments=("-S", "-c", waits))])
    newest = saves.save(state(2), learner(0, updates=1), {})
    assert path.is_dir()
    go.write_text("")
    saves.finish_errands()
    assert newest.is_dir() and not path.exists()


def test_a_run_whose_folder_was_taken_over_deletes_nothing_there_at_its_end(tmp_path: Path):
    folder, said = tmp_path / "run" / "ckpt", tmp_path / "run" / "run.json"
    said.parent.mkdir()
    said.write_text('{"run_id": "first", "origin": "first"}')
    mine = Checkpoints(folder, rank=0, keep=1)
    saved = mine.save(state(1), learner(0, updates=1), {})
    said.write_text('{"run_id": "other", "origin": "other"}')
    under_way = folder / "step_9.tmp"
    under_way.mkdir()
    mine.finish_errands()
    assert saved.is_dir() and under_way.is_dir()


def test_exports_that_a_resume_makes_up_for_are_all_made(tmp_path: Path):
    errands = quick()
    each = Errand(kind="exports", what="one", checkpoint=tmp_path / "step_1", arguments=("-S", "-c", ""))
    errands.send([each] * 5)
    errands.finish(120.0)
    assert errands.counts() == {"checkpoint/exports": 5.0, "checkpoint/exports_failed": 0.0}


def test_a_second_copy_is_whole_and_begins_a_run_anywhere(tmp_path: Path):
    saves = Checkpoints(tmp_path / "run" / "ckpt", rank=0, keep=2)
    path = saves.save(state(4), learner(0, updates=1), {"x": 1})
    there = tmp_path / "bucket" / "run" / "step_5"
    for _ in range(2):  # the step may be trained, and saved, again
        assert Path(copy_checkpoint(path, f"file://{tmp_path}/bucket/run")) == there
        sealed.verify(there)
    (path / "__1_0.distcp").write_bytes(b"of a second rank")
    sealed.seal(path)
    copy_checkpoint(path, f"file://{there.parent}")
    (path / "__1_0.distcp").unlink()
    sealed.seal(path)
    copy_checkpoint(path, f"file://{there.parent}")
    sealed.verify(there)
    (there / "manifest.json").write_text("{")
    copy_checkpoint(path, f"file://{there.parent}")
    sealed.verify(there)
    (tmp_path / "bucket" / "other").write_text("not of the copy")
    for foreign in ({"files": ["../../other", f"{tmp_path}/bucket/other"]}, {"weight_map": {}}, ["x"]):
        (there / "manifest.json").write_text(json.dumps(foreign))
        copy_checkpoint(path, f"file://{there.parent}")
        sealed.verify(there)
    assert (tmp_path / "bucket" / "other").exists()
    fork = Checkpoints(tmp_path / "fork" / "ckpt", rank=0, keep=2)
    chosen, other = fork.choose(str(there), restarted=False), learner(1)
    assert chosen == there and fork.load(there, other) == (state(4), {"x": 1})


def test_a_copy_of_another_run_is_replaced_by_nobody(tmp_path: Path):
    url, folders = f"file://{tmp_path}/bucket", [tmp_path / name / "ckpt" for name in ("one", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder.parent / "run.json").write_text(json.dumps({"run_id": "newest", "origin": folder.parent.name}))
    one, other = (Checkpoints(folder, rank=0, keep=2).save(state(4), learner(0, updates=1), {}) for folder in folders)
    quick(copy_to=url).begin("one")
    there = Path(copy_checkpoint(one, url))
    before = (there / "manifest.json").read_bytes()
    with pytest.raises(FileExistsError, match=r"of another run \(one, this is other\)"):
        copy_checkpoint(other, url)
    with pytest.raises(ConfigError, match=r"learner.copy_to=file.*step_5 is a copy of another run"):
        quick(copy_to=url).begin("other")
    sealed.verify(there)
    assert (there / "manifest.json").read_bytes() == before
    quick(copy_to=url).begin("one")  # gone on with before anything was saved here


def test_a_run_does_not_begin_where_its_copies_cannot_be(tmp_path: Path):
    (tmp_path / "bucket").write_text("a file")
    with pytest.raises(ConfigError, match=r"checkpoints cannot be copied there: .*bucket"):
        quick(copy_to=f"file://{tmp_path}/bucket/run").begin("one")


def test_a_learner_that_is_started_again_before_its_first_checkpoint_goes_on_without_that_place(tmp_path: Path):
    (tmp_path / "bucket").write_text("a file")
    config = load_config([*REQUIRED, f"learner.copy_to=file://{tmp_path}/bucket/run", f"run.dir={tmp_path}/run"])
    first = Place(rank=0, world=1, device=torch.device("cpu"), restarted=False, run_id="one")

    def opened(place: Place) -> Kept:
        with ExitStack() as stack:
            return open_checkpoints(config, place, stack, run_dir=tmp_path / "run", resume="never")

    with pytest.raises(ConfigError, match="cannot be copied there"):
        opened(first)
    assert opened(replace(first, restarted=True)).resume_from is None


def test_a_place_where_nothing_may_be_deleted_takes_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(files: LocalFileSystem, path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(LocalFileSystem, "rm_file", denied)
    for _ in range(2):
        begin_copies("one", f"file://{tmp_path}/bucket")


def test_a_fork_does_not_begin_where_the_copies_of_its_origin_lie(tmp_path: Path):
    for name in ("old", "new"):
        (tmp_path / name / "ckpt").mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(json.dumps({"run_id": "newest", "origin": name}))
    path = Checkpoints(tmp_path / "old" / "ckpt", rank=0, keep=2).save(state(4), learner(0, updates=1), {})
    copy_checkpoint(path, f"file://{tmp_path}/bucket")
    place = Place(rank=0, world=1, device=torch.device("cpu"), restarted=False, run_id="newest")
    for bucket, refused in (("bucket", True), ("another", False)):
        config = load_config([*REQUIRED, f"learner.copy_to=file://{tmp_path}/{bucket}", f"run.dir={tmp_path}/new"])
        told = pytest.raises(ConfigError, match="copy of another run") if refused else nullcontext()
        with ExitStack() as stack, told:
            open_checkpoints(config, place, stack, run_dir=tmp_path / "new", resume=str(path))


def test_a_copy_that_a_death_prevented_is_made_by_the_resume(tmp_path: Path):
    folder, url = tmp_path / "run" / "ckpt", f"file://{tmp_path}/bucket"
    path = Checkpoints(folder, rank=0, keep=2).save(state(4), learner(0, updates=1), {})
    errands = quick(copy_to=url)
    assert Checkpoints(folder, rank=0, keep=2, errands=errands).choose("auto", restarted=False) == path
    errands.finish(120.0)
    there = tmp_path / "bucket" / "step_5"
    sealed.verify(there)
    before = (there / "manifest.json").stat().st_mtime_ns
    copy_checkpoint(path, url)
    assert (there / "manifest.json").stat().st_mtime_ns == before, "the same one is not sent twice"


def test_exports_that_a_death_prevented_are_made_by_the_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "run" / "ckpt"
    saves = Checkpoints(folder, rank=0, keep=4)
    for step in (1, 2, 3, 5):
        newest = saves.save(state(step), learner(0, updates=1), {})
    (tmp_path / "run" / "exports" / "step_2" / "hf").mkdir(parents=True)
    errands, sent = quick(export_every=2), []
    monkeypatch.setattr(errands, "send", sent.extend)
    assert Checkpoints(folder, rank=0, keep=4, errands=errands).choose("auto", restarted=False) == newest
    assert [each.what for each in sent] == ["the export of step_4", "the export of step_6"]
    assert sent[0].arguments == ("-m", "asyncrl.cli.export", str(tmp_path / "run"), "4")


def test_the_checkpoint_to_export_is_the_one_that_was_asked_for_or_the_newest_whole_one(tmp_path: Path):
    saves = Checkpoints(tmp_path / "ckpt", rank=0, keep=3)
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        chosen_checkpoint(tmp_path, None)
    first, second = (saves.save(state(step), learner(0, updates=1), {}) for step in (0, 1))
    assert chosen_checkpoint(tmp_path, None) == second and chosen_checkpoint(tmp_path, 1) == first
    with pytest.raises(CheckpointError, match=r"step_7 does not exist\. There are step_1, step_2"):
        chosen_checkpoint(tmp_path, 7)
    (second / "state.json").write_text("{}")
    assert chosen_checkpoint(tmp_path, None) == first
    with pytest.raises(CheckpointError, match=r"state\.json"):
        chosen_checkpoint(tmp_path, 2)
    assert (tmp_path / "ckpt" / "step_2").is_dir(), "who only reads moves nothing"


def test_no_errand_outlives_the_learner(tmp_path: Path):
    begun = tmp_path / "pid"
    hangs = f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    errand = f"Errand(kind='copies', what='', checkpoint=Path('x'), arguments=('-S', '-c', {hangs!r}))"
    code = f"""
from pathlib import Path; from asyncrl.learner.checkpoints.errands import Errand, Errands
errands = Errands(); errands.send([{errand}]); errands.finish(600.0)
"""
    learner = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: begun.is_file() and begun.read_text() != "", within_s=60.0)
        child = process_at(int(begun.read_text()))
        assert child is not None
    finally:
        learner.kill()
        learner.wait()
    until(lambda: not is_alive(child), within_s=10.0)
