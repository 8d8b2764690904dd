"""The best checkpoint is kept beside the newest ones over deaths, resumes and branches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.cli.processes.ending import best_line
from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.storage import sealed
from asyncrl.storage.best import BEST, BEST_FILE, BestCheckpoint, read_best
from asyncrl.storage.checkpoints import LATEST, begin_branch, finished, prune

METRIC = "eval/heldout/accuracy"


class Saved:
    """Checkpoints of a learner that keeps two and the best."""

    def __init__(self, folder: Path, mode: str = "max", metric: str = METRIC) -> None:
        self.folder, self.best = folder, BestCheckpoint(folder, metric, mode)
        folder.mkdir(exist_ok=True)
        self.best.begin()

    def save(self, step: int) -> None:
        made = self.folder / f"step_{step}"
        made.mkdir()
        (made / "state.json").write_text(json.dumps({"step": step - 1, "policy_version": step}))
        sealed.point(self.folder / LATEST, made)
        prune(self.folder, made, 2, self.best.kept())

    def told(self, step: int, value: float | None) -> bool:
        return self.best.told(step, value, (step, step + 1))

    def names(self) -> list[str]:
        return [path.name for path in finished(self.folder)]


def test_the_best_stays_and_gives_way_to_a_better_one(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "ckpt")
    for step, value in ((2, 0.5), (4, 0.3), (6, None), (8, 0.5)):
        saved.save(step)
        assert saved.told(step, value) == (step == 2)
    assert saved.names() == ["step_2", "step_6", "step_8"]
    assert (saved.folder / BEST).readlink() == Path("step_2")
    found = read_best(saved.folder)
    assert found is not None and (found.value, found.step, found.version_min, found.version_max) == (0.5, 2, 2, 3)
    assert saved.told(8, 0.6)
    saved.save(10)
    assert saved.names() == ["step_8", "step_10"]
    assert (saved.folder / BEST).resolve().name == "step_8"


def test_the_smallest_is_best_where_that_is_asked_for_and_what_is_no_number_never_is(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "ckpt", mode="min")
    for step, value in ((2, float("nan")), (4, 0.5), (6, 0.4), (8, float("-inf"))):
        saved.save(step)
        saved.told(step, value)
    assert (saved.folder / BEST).readlink() == Path("step_6")


def test_a_checkpoint_stays_while_its_weights_are_being_measured(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "ckpt")
    saved.best.asked(2)
    for step in (2, 4, 6, 8):
        saved.save(step)
    assert saved.names() == ["step_2", "step_6", "step_8"]
    assert saved.told(2, 0.9)
    saved.best.asked(10)
    saved.best.asked(14)
    for step in (10, 12, 14, 16, 18):
        saved.save(step)
    assert saved.names() == ["step_2", "step_10", "step_14", "step_16", "step_18"]
    assert not saved.told(14, 0.1)  # the evaluation of step 10 was superseded, and nobody says so
    saved.save(20)
    assert saved.names() == ["step_2", "step_18", "step_20"]
    assert not saved.told(12, 1.0)  # of weights that nobody saved


def test_a_resume_goes_on_with_what_was_best(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "ckpt")
    saved.save(2)
    saved.told(2, 0.5)
    again = Saved(tmp_path / "ckpt")
    for step in (4, 6, 8):
        again.save(step)
        assert not again.told(step, 0.4)
    assert again.names() == ["step_2", "step_6", "step_8"]


def test_a_branch_from_before_the_best_leaves_it_the_best_under_its_new_name(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "ckpt")
    for step, value in ((2, 0.5), (4, 0.9)):
        saved.save(step)
        saved.told(step, value)
    begin_branch(saved.folder, (saved.folder / "step_2").resolve(), "ckpt/step_2", "start")
    branch = Saved(tmp_path / "ckpt")
    assert (saved.folder / BEST).readlink() == Path("left_step_4")
    branch.save(4)  # other weights under the same name
    assert not branch.told(4, 0.7)
    assert (saved.folder / BEST).readlink() == Path("left_step_4")
    assert branch.told(4, 0.95)
    assert (saved.folder / BEST).readlink() == Path("step_4")


def test_the_best_of_a_left_line_is_found_among_names_that_begin_alike_and_without_a_metric_too(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "ckpt")
    for step, value in ((4, 0.9), (40, 0.5)):
        saved.save(step)
        saved.told(step, value)
    begin_branch(saved.folder, tmp_path / "other" / "step_2", "other/step_2", "start")
    Saved(tmp_path / "ckpt", metric="").save(4)
    assert (saved.folder / BEST).readlink() == Path("left_step_4")
    assert json.loads((saved.folder / BEST_FILE).read_text())["checkpoint"] == "left_step_4"


def test_a_death_between_the_file_and_the_link_is_mended(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "ckpt")
    for step, value in ((2, 0.5), (4, 0.9)):
        saved.save(step)
        saved.told(step, value)
    sealed.point(saved.folder / BEST, saved.folder / "step_2")  # best.json was written, the link not yet
    Saved(tmp_path / "ckpt")
    assert (saved.folder / BEST).readlink() == Path("step_4")


@pytest.mark.parametrize("damage", ["cut", "gone", "other", "saved again"])
def test_what_cannot_be_trusted_is_said_and_the_best_is_looked_for_anew(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = Saved(tmp_path / "ckpt")
    saved.save(2)
    saved.told(2, 0.9)
    file = saved.folder / BEST_FILE
    if damage == "cut":
        file.write_text(file.read_text()[:20])
    elif damage == "gone":
        sealed.remove(saved.folder / "step_2")
    elif damage == "saved again":
        saved.best.replaced(saved.folder / "step_2")
    again = Saved(tmp_path / "ckpt", metric="reward/mean" if damage == "other" else METRIC)
    assert ("best" in caplog.text) == (damage != "saved again")
    again.save(4)
    assert again.told(4, 0.1)
    assert (saved.folder / BEST).readlink() == Path("step_4")


def test_the_report_names_the_best_or_the_metric_that_was_meant(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "ckpt")
    rows = [{"step": 2, "reward/mean": 0.5}]
    assert best_line("reward/mena", tmp_path, rows).endswith("has a value of this metric. Did you mean `reward/mean`?")
    assert best_line(METRIC, tmp_path, [{METRIC: 1.0}]).endswith("no checkpoint has a value of this metric.")
    saved.save(2)
    saved.told(2, 0.5)
    assert best_line(METRIC, tmp_path, rows).endswith(f"ckpt/best, of step 2: {METRIC} 0.5")


GIVEN = ["model.path=m", "data.path=d", "reward=exact_match", "learner.save_every=20"]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["learner.keep_best=eval/heldout/accuracy"], ["the evaluated sets are none"]),
        (["eval.path=e", "eval.every=10", "learner.keep_best=eval/held/accuracy"], ["are heldout", "`heldout`"]),
        (
            ["eval.path=e", "eval.every=10", "learner.keep_best=eval/heldout/reward"],
            ["heldout is measured by accuracy"],
        ),
        (["eval.path=e", "eval.every=10", "learner.keep_best=eval/heldout/pass@8"], ["measured by accuracy ("]),
        (["eval.path=e", "eval.every=15", "learner.keep_best=eval/heldout/accuracy"], ["Set eval.every=20"]),
        (["eval.path=e", "learner.keep_best=eval/heldout/accuracy"], ["Set eval.every=20"]),
        (["learner.keep_best_by=min"], ["does nothing without learner.keep_best"]),
        (["learner.keep_best=reward/mean", "learner.keep_best_by=least"], ["must be one of max, min"]),
    ],
)
def test_a_metric_that_no_checkpoint_would_have_is_refused(settings: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([*GIVEN, *settings])
    for part in parts:
        assert part in str(refused.value)


def test_a_metric_that_checkpoints_have_is_taken() -> None:
    sampled = ["eval.path=e", "eval.every=10", "eval.samples=8", "eval.temperature=1"]
    for metric in ("accuracy", "pass@8", "maj@4", "avg@8"):
        load_config([*GIVEN, *sampled, f"learner.keep_best=eval/heldout/{metric}"])
    load_config([*GIVEN, "learner.keep_best=reward/mean"])
