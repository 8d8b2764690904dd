"""A checkpoint that is written during training contains the state from when it began, whatever happens meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from asyncrl.errors import CheckpointError
from asyncrl.learner.checkpoints import checkpoint
from asyncrl.learner.checkpoints.checkpoint import Checkpoints
from asyncrl.learner.checkpoints.saving import BackgroundSave, HostCopy
from asyncrl.storage.best import BestCheckpoint, read_best
from tests.learner.checkpoints.test_checkpoint import SNAPSHOT, learner, state, update
from tests.pretended_gpu import pretended_gpus

GPU = torch.device("cuda", 1)


def beside(folder: Path, **settings) -> Checkpoints:
    return Checkpoints(folder, rank=0, keep=2, background=True, **settings)


def weights_of(roles) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in roles.policy.parameters()]


def held_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written until it is set."""
    go, write = threading.Event(), checkpoint.write_tensors

    def late(*given, **named) -> None:
        assert go.wait(60)
        write(*given, **named)

    monkeypatch.setattr(checkpoint, "write_tensors", late)
    return go


def test_steps_that_follow_change_nothing_of_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    roles, mine, go = learner(0, updates=2), beside(tmp_path), held_writes(monkeypatch)
    for step in (4, 5):  # the second copy goes where the first one lies
        before = weights_of(roles)
        go.clear()
        mine.begin(state(step), roles, SNAPSHOT)
        for _ in range(3):
            update(roles.policy, roles.optimizer)
        assert mine.saved() == [] and mine.newest() == (tmp_path / "step_5" if step == 5 else None)
        go.set()
        mine.finish()
        assert mine.saved() == [step] and mine.saved() == []
        other, newest = learner(1), mine.newest()
        assert newest == tmp_path / f"step_{step + 1}" and mine.load(newest, other) == (state(step), SNAPSHOT)
        assert all(map(torch.equal, before, weights_of(other)))
        update(other.policy, other.optimizer)
        assert not all(map(torch.equal, weights_of(roles), weights_of(other)))


def test_an_optimizer_waits_for_the_copy_and_for_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    roles, mine, go = learner(0, updates=1), beside(tmp_path), held_writes(monkeypatch)
    take, copying, copied = HostCopy.take, threading.Event(), threading.Event()

    def slow(self, tensors):
        assert copying.wait(60)
        copied.set()
        return take(self, tensors)

    monkeypatch.setattr(HostCopy, "take", slow)
    mine.begin(state(0), roles, {})
    threading.Timer(0.2, copying.set).start()
    update(roles.policy, roles.optimizer)
    assert copied.is_set(), "the step came first"
    assert mine.timings()["checkpoint/copy_wait_s"] > 0.05 and mine.newest() is None
    go.set()
    mine.finish()
    assert mine.timings().keys() == {"checkpoint/save_s", "checkpoint/wait_s"}


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    roles, mine, go = learner(0, updates=1), beside(tmp_path), held_writes(monkeypatch)
    mine.begin(state(0), roles, {})
    threading.Timer(0.2, go.set).start()
    mine.begin(state(1), roles, {})
    assert (tmp_path / "step_1").is_dir()
    mine.finish()
    assert mine.saved() == [0, 1] and mine.newest() == tmp_path / "step_2"


def test_a_save_that_fails_or_hangs_ends_the_run_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    roles, mine = learner(0, updates=1), beside(tmp_path)
    first = mine.save(state(0), roles, {})

    def broken(*_given, **_named) -> None:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(checkpoint, "write_tensors", broken)
    mine.begin(state(1), roles, {})
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step_2: .*not yours"):
        mine.finish()
    go = held_writes(monkeypatch)
    mine.begin(state(1), roles, {})
    mine._under_way._within_s = 0.2
    with pytest.raises(CheckpointError, match=r"step_2 is still being written .* learner\.save_timeout_s"):
        mine.finish()
    mine.close(0.01)  # says so, and lets the learner end
    go.set()
    assert Checkpoints(tmp_path, rank=0, keep=2).newest() == first


def test_a_result_that_comes_before_its_checkpoint_is_whole_counts_when_it_is(tmp_path: Path, monkeypatch):
    best = BestCheckpoint(tmp_path, "eval/heldout/accuracy")
    roles, mine, go = learner(0, updates=1), beside(tmp_path, best=best), held_writes(monkeypatch)
    mine.begin(state(3), roles, {})
    assert not best.told(4, 0.7, (4, 4)), "there is nothing yet to keep"
    go.set()
    mine.finish()
    found = read_best(tmp_path)
    assert found is not None and (found.checkpoint, found.value) == ("step_4", 0.7)
    for step in (4, 5, 6):
        mine.save(state(step), roles, {})
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_4", "step_6", "step_7"]


def test_checkpoints_of_each_so_many_steps_stay(tmp_path: Path):
    roles, mine = learner(0, updates=1), beside(tmp_path, every=4)
    for step in range(1, 12, 2):
        mine.save(state(step), roles, {})
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_10", "step_12", "step_4", "step_8"]


def test_a_save_is_written_by_a_thread_that_is_on_the_gpu_of_its_rank():
    """torch's writer waits for copies from the GPU of its thread; from another one it would write unfinished ones."""
    save, seen = BackgroundSave(60.0), list[int]()
    with pretended_gpus(2):
        save.start("a checkpoint", lambda: None, lambda: seen.append(torch.cuda.current_device()), GPU)
        save.finish()
        assert seen == [GPU.index] and torch.cuda.current_device() != GPU.index
