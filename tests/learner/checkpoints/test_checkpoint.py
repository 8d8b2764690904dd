from __future__ import annotations

import shutil
from pathlib import Path
from traceback import StackSummary
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.errors import CheckpointError, CheckpointMismatchError, RunFolderError
from asyncrl.learner.checkpoints import tensors, writing
from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
from asyncrl.learner.checkpoints.resume import begin
from asyncrl.learner.model.attention import PACKED_ATTENTION
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.optimizer.update import make_optimizer
from asyncrl.learner.roles import Roles
from asyncrl.replay.protocol import LearnerReplay
from asyncrl.schema import LearnerConfig
from asyncrl.storage import sealed
from asyncrl.storage.checkpoints import SUPERVISED, newest
from tests.learner.feed import tiny_model

SNAPSHOT = {"cursor": 12, "tree": {5: 2}, "blob": b"\x00\xff"}


def learner(seed: int, updates: int = 0, offload: str = "none", optimizer: str = "adamw", **changes: Any) -> Roles:
    hf = tiny_model(seed=seed, **changes)
    hf.set_attn_implementation(PACKED_ATTENTION)
    model = PolicyModel(hf)
    made = make_optimizer(model.parameters(), LearnerConfig(lr=0.01, offload=offload, optimizer=optimizer))
    for _ in range(updates):
        update(model, made)
    return Roles(policy=model, optimizer=made)


def update(model: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().sin()
    optimizer.step()
    optimizer.zero_grad()


def state(step: int) -> LearnerState:
    return LearnerState(step=step, policy_version=step + 3, skipped_steps=1)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_resumed_learner_goes_on_exactly_like_the_saved_one(optimizer: str, tmp_path: Path):
    roles = learner(0, updates=3, optimizer=optimizer)
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    checkpoints.save(state(4), roles, SNAPSHOT)
    other = learner(1, optimizer=optimizer)
    newest = checkpoints.newest()
    assert newest is not None
    assert checkpoints.load(newest, other) == (state(4), SNAPSHOT)
    update(roles.policy, roles.optimizer)
    update(other.policy, other.optimizer)
    for mine, theirs in zip(roles.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("optimizer", "none"), ("none", "optimizer"), ("optimizer", "optimizer")]
)
def test_moments_in_host_memory_are_the_same_bits_saved_and_loaded_too(saved: str, loaded: str, tmp_path: Path):
    without, roles, other = learner(0, updates=4), learner(0, updates=3, offload=saved), learner(1, offload=loaded)
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    checkpoints.load(checkpoints.save(state(4), roles, SNAPSHOT), other)
    update(other.policy, other.optimizer)
    for mine, theirs in zip(without.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        moments = without.optimizer.state[mine], other.optimizer.state[theirs]
        assert moments[0].keys() == moments[1].keys()
        assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])


@pytest.mark.parametrize(
    ("saved", "loaded", "found"), [("adamw", "adamw_8bit", "without"), ("adamw_8bit", "adamw", "with")]
)
def test_moments_of_another_optimizer_are_refused_by_its_setting(saved: str, loaded: str, found: str, tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    path = checkpoints.save(state(4), learner(0, updates=1, optimizer=saved), SNAPSHOT)
    with pytest.raises(CheckpointMismatchError, match=f"saved {found} an optimizer of 8 bits.*learner.optimizer"):
        checkpoints.load(path, learner(1, optimizer=loaded))


def test_a_checkpoint_of_another_run_is_refused_unless_it_is_named(tmp_path: Path):
    roles = learner(0, updates=1)
    (tmp_path / "run.json").write_text('{"run_id": "second", "origin": "first"}')
    mine = Checkpoints(tmp_path / "ckpt", rank=0, keep=2)
    saved = mine.save(state(4), roles, SNAPSHOT)
    assert mine.choose("auto", restarted=False) == saved
    assert mine.load(saved, learner(1))[0].run == "first"
    (tmp_path / "run.json").write_text('{"run_id": "other", "origin": "other"}')
    with pytest.raises(
        RunFolderError, match="belonged to run first when this learner began, and now belongs to run other"
    ):
        mine.save(state(5), roles, SNAPSHOT)
    theirs = Checkpoints(tmp_path / "ckpt", rank=0, keep=2)
    for restarted, resume in ((False, "auto"), (True, "never")):
        with pytest.raises(CheckpointMismatchError, match="saved by run first, but this folder belongs to run other"):
            theirs.choose(resume, restarted=restarted)
    assert theirs.choose(str(saved), restarted=False) == saved


def test_a_resume_goes_on_with_the_decay_and_the_betas_of_its_settings(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    checkpoints.save(state(4), learner(0, updates=1), SNAPSHOT)
    other = learner(1)
    other.optimizer = make_optimizer(other.policy.parameters(), LearnerConfig(lr=0.5, weight_decay=0.25, beta2=0.5))
    wanted = [{key: group[key] for key in ("lr", "betas", "weight_decay")} for group in other.optimizer.param_groups]
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.load(newest, other)
    assert [
        {key: group[key] for key in given} for group, given in zip(other.optimizer.param_groups, wanted, strict=True)
    ] == wanted


def test_latest_points_to_the_newest_and_older_ones_are_removed(tmp_path: Path):
    roles = learner(0, updates=1)
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    for step in (8, 98, 109):
        checkpoints.save(state(step), roles, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_110", "step_99"]
    assert checkpoints.newest() == tmp_path / "step_110"


def test_a_run_that_was_copied_by_what_follows_links_goes_on_and_saves(tmp_path: Path):
    Checkpoints(tmp_path / "run", rank=0, keep=1).save(state(1), learner(0), {})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # `latest` is a folder there, as after `scp -r`
    copy = Checkpoints(tmp_path / "copy", rank=0, keep=1)
    found, said = newest(tmp_path / "copy")
    assert found == tmp_path / "copy" / "step_2" and "latest is not a link" in said
    copy.save(state(2), learner(0), {})
    assert (tmp_path / "copy" / "latest").readlink() == Path("step_3")
    assert (tmp_path / "copy" / "latest.copied" / "state.json").exists()
    assert not (tmp_path / "copy" / "step_2").exists()


def test_a_step_saved_again_takes_the_place_of_the_old_one(tmp_path: Path):
    roles = learner(0, updates=1)
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    for step in (3, 9):
        checkpoints.save(state(step), roles, {})
    update(roles.policy, roles.optimizer)
    checkpoints.save(state(9), roles, SNAPSHOT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_10", "step_4"]
    found, other = checkpoints.newest(), learner(1)
    assert found is not None and checkpoints.load(found, other) == (state(9), SNAPSHOT)
    for mine, theirs in zip(roles.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_kill_while_a_step_is_replaced_leaves_the_one_before_it(tmp_path: Path):
    roles = learner(0, updates=1)
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    for step in (3, 9):
        checkpoints.save(state(step), roles, {})
    (tmp_path / "step_10").rename(tmp_path / "step_10.old.tmp")
    assert checkpoints.newest() == tmp_path / "step_4"


def test_what_a_killed_save_left_behind_is_never_chosen_and_goes_with_the_next_save(tmp_path: Path):
    roles = learner(0, updates=1)
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    checkpoints.save(state(0), roles, {})
    (tmp_path / "step_2.tmp").mkdir()
    (tmp_path / "step_2.tmp" / "__0_0.distcp").write_bytes(b"half")
    for name in ("step_0.tmp", "step_2.old.tmp"):  # a death while they were removed
        (tmp_path / name).mkdir()
    assert checkpoints.choose("auto", restarted=False) == tmp_path / "step_1"
    checkpoints.save(state(1), roles, {})
    assert checkpoints.choose("auto", restarted=False) == tmp_path / "step_2"
    assert not list(tmp_path.glob("*.tmp")), "of many gigabytes"


@pytest.mark.parametrize("by_name", [False, True])
def test_a_resume_reads_the_checkpoint_once_to_prove_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool):
    roles = learner(0, updates=1)
    path = Checkpoints(tmp_path, rank=0, keep=2).save(state(0), roles, {})
    read = counted(monkeypatch)
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    chosen = checkpoints.choose(str(path) if by_name else "auto", restarted=False)
    assert chosen is not None
    checkpoints.load(chosen, roles)
    assert sorted(read) == sorted(each.name for each in path.iterdir() if each.name != sealed.MANIFEST)
    (path / "state.json").write_bytes((path / "state.json").read_bytes().replace(b"}", b" "))
    with pytest.raises(CheckpointError, match=r"state\.json was changed"):
        checkpoints.load(chosen, roles)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to prove a checkpoint, however young they are."""
    read, digest = [], sealed._digest
    monkeypatch.setattr(sealed, "SETTLED_NS", 0)
    monkeypatch.setattr(sealed, "_digest", lambda path: read.append(path.name) or digest(path))
    return read


def test_a_damaged_checkpoint_is_refused_by_file_name(tmp_path: Path):
    roles = learner(0, updates=1)
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    path = checkpoints.save(state(0), roles, {})
    weights = next(path.glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=weights.name):
        checkpoints.choose("auto", restarted=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.self_attn\.q_proj\.weight \(model\) is in the checkpoint only"),
        ({"num_hidden_layers": 5}, r"model\.layers\.2\.self_attn\.q_proj\.weight \(model\) is in the model only"),
        ({"intermediate_size": 32}, r"gate_proj\.weight \(model\) is \[64, 32\] in the checkpoint and \[32, 32\]"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight\.step \(optimizer\) is in the model only"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_fills_nothing(tmp_path: Path, change: dict, named: str):
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    path = checkpoints.save(state(0), learner(0, updates=1), {})
    other = learner(1, **change)
    before = [parameter.detach().clone() for parameter in other.policy.parameters()]
    with pytest.raises(CheckpointMismatchError, match=named) as caught:
        checkpoints.load(path, other)
    assert "does not fit the model" in str(caught.value) and "Resume with the model.path" in str(caught.value)
    assert all(map(torch.equal, before, other.policy.parameters()))


def test_a_checkpoint_whose_optimizer_knows_more_or_less_than_this_one_is_refused(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    whole, part = learner(0, updates=1), learner(0)
    part.optimizer = make_optimizer(part.policy.hf.model.layers.parameters(), LearnerConfig())
    for saved, other in ((whole, part), (part, whole)):
        path = checkpoints.save(state(0), saved, {})
        with pytest.raises(CheckpointMismatchError, match=r"embed_tokens\.weight\.\w+ \(optimizer\) is in the"):
            checkpoints.load(path, other)


def test_a_checkpoint_of_another_version_of_asyncrl_is_refused_by_what_it_says(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    path = checkpoints.save(state(0), learner(0, updates=1), {})
    (path / "state.json").write_text('{"step": 0, "policy_version": 3, "moons": 2}')
    (path / sealed.MANIFEST).unlink()
    sealed.seal(path)
    with pytest.raises(CheckpointMismatchError, match=r"state\.json was written by another version .* moons"):
        checkpoints.load(path, learner(0))


def test_a_file_that_cannot_be_read_or_a_rank_that_is_gone_is_no_mismatch(tmp_path: Path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    path = checkpoints.save(state(0), learner(0, updates=1), {})
    for error in (
        CheckpointException("load", {1: (OSError("stale handle"), StackSummary())}),
        RuntimeError("Connection closed by peer"),
    ):

        def load(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(tensors.state_dict_loader, "load", load)
        with pytest.raises(CheckpointError, match=r"stale handle|Connection closed") as caught:
            checkpoints.load(path, learner(0))
        assert not isinstance(caught.value, CheckpointMismatchError)


def test_what_a_rank_could_not_write_is_told_without_torch_s_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def save(*_: object, **__: object) -> None:
        trace = StackSummary.from_list([("f.py", 1, "write", "write()")])
        raise CheckpointException("write", {1: (OSError(5, "Input/output error"), trace)})

    monkeypatch.setattr(writing.state_dict_saver, "save", save)
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path, rank=0, keep=2).save(state(0), learner(0, updates=1), {})
    assert f"cannot write checkpoint {tmp_path}/step_1: rank 1: [Errno 5] Input/output error. Earl" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_failed_write_leaves_the_earlier_checkpoint(tmp_path: Path):
    roles = learner(0, updates=1)
    checkpoints = Checkpoints(tmp_path, rank=0, keep=2)
    first = checkpoints.save(state(0), roles, {})
    (tmp_path / "step_2.tmp").write_text("a file where the folder has to go")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step_2"):
        checkpoints.save(state(1), roles, {})
    assert checkpoints.newest() == first


@pytest.mark.parametrize(
    ("resume", "restarted", "saved", "chosen"),
    [
        ("never", False, True, None),
        ("never", True, True, "step_1"),
        ("never", True, False, None),
        ("auto", False, True, "step_1"),
        ("auto", False, False, None),
    ],
)
def test_which_checkpoint_is_chosen(tmp_path: Path, resume: str, restarted: bool, saved: bool, chosen: str | None):
    checkpoints = Checkpoints(tmp_path, rank=0, keep=1)
    if saved:
        checkpoints.save(state(0), learner(0, updates=1), {})
    assert checkpoints.choose(resume, restarted) == (chosen and tmp_path / chosen)


@pytest.mark.parametrize("resume", ["never", "auto", "a path"])
def test_ranks_that_torchrun_does_not_count_as_restarted_go_on_all_the_same(tmp_path: Path, resume: str):
    """As when a machine joins: another round of ranks under the same id, and no restart counted."""
    (tmp_path / "run.json").write_text('{"run_id": "start", "origin": "start"}')
    roles, mine = learner(0, updates=1), Checkpoints(tmp_path / "ckpt", rank=0, keep=3)
    if resume == "a path":
        resume = str(Checkpoints(tmp_path / "theirs", rank=0, keep=1).save(state(6), roles, {}))
    assert not mine.begun(resume)
    mine.choose(resume, mine.begun(resume))
    mine.begin_branch()
    saved = mine.save(state(9), roles, {})
    again = Checkpoints(tmp_path / "ckpt", rank=0, keep=3)
    assert again.begun(resume) == (resume != "auto")
    assert again.choose(resume, again.begun(resume)) == saved
    (tmp_path / "run.json").write_text('{"run_id": "later", "origin": "start"}')
    assert not Checkpoints(tmp_path / "ckpt", rank=0, keep=3).begun(resume), "another start of the run"


def test_a_path_is_taken_until_this_run_has_saved_its_own(tmp_path: Path):
    theirs = Checkpoints(tmp_path / "theirs", rank=0, keep=1)
    path = theirs.save(state(6), learner(0, updates=1), {})
    mine = Checkpoints(tmp_path / "mine", rank=0, keep=1)
    assert mine.choose(str(path), restarted=False) == path
    assert mine.choose(str(path), restarted=True) == path
    mine.begin_branch()
    own = mine.save(state(9), learner(0, updates=1), {})
    assert mine.choose(str(path), restarted=True) == own


def test_a_branch_is_what_restarts_go_on_from_and_what_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "run.json").write_text('{"run_id": "one", "origin": "one"}')
    roles, folder = learner(0, updates=1), tmp_path / "ckpt"
    for step in (49, 99, 149):
        before = Checkpoints(folder, rank=0, keep=3)
        before.save(state(step), roles, {})
    (tmp_path / "run.json").write_text('{"run_id": "two", "origin": "one"}')
    resume = str(folder / "step_50")
    mine = Checkpoints(folder, rank=0, keep=2)
    assert mine.choose(resume, restarted=False) == folder / "step_50"
    assert mine.newest() == folder / "step_150" and len(list(folder.glob("step_*"))) == 3, "not loaded yet"
    mine.begin_branch()
    assert "step_150 is from the steps that this resume leaves behind. It is kept as left_step_150" in caplog.text
    assert mine.choose(resume, restarted=True) == mine.newest() == folder / "step_50", "killed before it saved"
    assert {path.name for path in folder.glob("*step_*")} == {"step_50", "left_step_100", "left_step_150"}
    mine.save(state(59), roles, {})
    newest = mine.save(state(69), roles, {})
    assert mine.choose(resume, restarted=True) == newest == folder / "step_70"
    assert {path.name for path in folder.glob("step_*")} == {"step_60", "step_70"}
    # Another start of the same command goes back to where the branch begins, if that is still there.
    (tmp_path / "run.json").write_text('{"run_id": "three", "origin": "one"}')
    with pytest.raises(CheckpointError, match="step_50"):
        mine.choose(resume, restarted=False)
    assert mine.choose(str(folder / "left_step_150"), restarted=False) == folder / "left_step_150"
    mine.begin_branch()
    assert mine.newest() == folder / "left_step_150"


def test_a_branch_from_another_folder_leaves_all_that_is_here(tmp_path: Path):
    roles = learner(0, updates=1)
    path = Checkpoints(tmp_path / "theirs", rank=0, keep=1).save(state(6), roles, {})
    mine = Checkpoints(tmp_path / "mine", rank=0, keep=2)
    mine.save(state(2), roles, {})
    shutil.copytree(tmp_path / "mine" / "step_3", tmp_path / "mine" / "step_3_good")
    assert mine.choose(str(path), restarted=False) == path == mine.choose(str(path), restarted=True)
    mine.begin_branch()
    assert mine.newest() is None
    with pytest.raises(RunFolderError, match=f"was begun from {path} .* Continue with resume={path},"):
        mine.choose("auto", restarted=False)
    own = mine.save(state(9), roles, {})
    assert mine.choose(str(path), restarted=True) == own == mine.choose("auto", restarted=False)


def test_a_path_that_does_not_fit_leaves_what_is_here_as_it_was(tmp_path: Path):
    here = Checkpoints(tmp_path / "mine", rank=0, keep=2).save(state(2), learner(0, updates=1), {})
    theirs = Checkpoints(tmp_path / "theirs", rank=0, keep=2)
    wide = theirs.save(state(6), learner(0, updates=1, intermediate_size=32), {})
    supervised = theirs.save(state(7), learner(0, updates=1), {"schema": SUPERVISED})
    for path, why in ((wide, "does not fit the model"), (supervised, "was saved by asyncrl sft")):
        mine = Checkpoints(tmp_path / "mine", rank=0, keep=2)
        chosen = mine.choose(str(path), restarted=False)
        with pytest.raises(CheckpointMismatchError, match=why):
            begin(cast(LearnerReplay, None), mine, learner(0), chosen, rank=0, device=torch.device("cpu"))
        assert mine.newest() == here


def test_where_the_newest_is_damaged_the_one_before_it_is_taken_and_that_is_said_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    roles = learner(0, updates=1)
    saves = Checkpoints(tmp_path, rank=0, keep=3)
    first, second, third = (saves.save(state(step), roles, {}) for step in (0, 1, 2))
    for path in (second, third):
        weights = next(path.glob("*.distcp"))
        weights.write_bytes(weights.read_bytes()[:-1])
    assert saves.choose("auto", restarted=False) == first
    said = caplog.text
    assert f"{third} IS DAMAGED" in said and f"{second} IS DAMAGED" in said and "Continuing from step_1" in said
    assert (tmp_path / "latest").readlink() == Path("step_1") and (tmp_path / "damaged_step_3").is_dir()
    caplog.clear()
    assert saves.choose("never", restarted=True) == first and not caplog.text, "a death before the next save"
    with pytest.raises(CheckpointError, match=r"damaged_step_3"):
        saves.choose(str(tmp_path / "damaged_step_3"), restarted=False)
