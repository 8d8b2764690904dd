from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import CheckpointError, NonFiniteError, NoProgress, WeightsError
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.resume import begin
from asyncrl.learner.roles import build_roles
from asyncrl.learner.train import Training, evaluation_metrics, train
from asyncrl.replay.config import ReplayConfig
from asyncrl.schema import Config, EvalConfig, LearnerConfig, ModelConfig, RunConfig
from asyncrl.types import NO_VERSION, EvalSummary
from asyncrl.weights.base import PublishStats
from tests.learner.fed_replay import FedReplay, KeptRows, KeptWeights, largest_difference
from tests.learner.feed import tiny_checkpoint

CPU = torch.device("cpu")


def make_config(folder: Path, **learner: Any) -> Config:
    settings = {"steps": 6, "lr": 1e-3, "save_every": 2, "max_tokens_per_microbatch": 60, "max_nonfinite_steps": 1}
    return Config(
        run=RunConfig(dir=str(folder / "run")),
        model=ModelConfig(path=str(tiny_checkpoint(folder / "model"))),
        learner=LearnerConfig(**(settings | learner)),
        replay=ReplayConfig(wait_timeout_s=0.2),
        eval=EvalConfig(every=4, path="heldout.jsonl"),
    )


def run(
    config: Config, replay: FedReplay, resume: bool = False, publisher: KeptWeights | None = None
) -> tuple[KeptWeights, KeptRows]:
    folder = Path(config.run.dir)
    checkpoints = Checkpoints(folder / "ckpt", rank=0, keep=config.learner.keep_checkpoints)
    roles = build_roles(config, CPU, None)
    resume_from = checkpoints.choose("auto" if resume else "never", restarted=False)
    publisher, rows = publisher or KeptWeights(), KeptRows()
    train(
        config,
        Training(
            replay=replay,
            publisher=publisher,
            roles=roles,
            checkpoints=checkpoints,
            start=begin(replay, checkpoints, roles, resume_from, rank=0, device=CPU),
            log=rows,
            run_dir=folder,
            rank=0,
            world=1,
            device=CPU,
        ),
    )
    return publisher, rows


def test_a_run_makes_its_calls_in_the_order_of_the_protocol(tmp_path: Path):
    replay = FedReplay()
    publisher, rows = run(make_config(tmp_path), replay)
    assert replay.named("restore") == [(None, NO_VERSION, None)]
    assert replay.named("publish") == [(0, NO_VERSION)]
    assert replay.named("trained") == [(step, step + 1) for step in range(6)]
    assert publisher.versions == list(range(7))
    assert replay.named("commit") == [1, 3, 5]
    assert replay.named("evaluate") == [(0, 0), (4, 4), (6, 6)]
    assert replay.named("lease") == list(range(6))
    assert replay.calls[-1][0] == "finish"
    assert [row["step"] for row in rows.rows] == [1, 2, 3, 4, 5, 6]
    assert [row["policy_version"] for row in rows.rows] == [1, 2, 3, 4, 5, 6]
    assert rows.rows[-1]["eval/heldout/step"] == 6


def test_a_row_has_what_the_documentation_names(tmp_path: Path):
    _, rows = run(make_config(tmp_path), FedReplay())
    row = rows.rows[0]
    names = """reward/mean reward/std reward/zero_variance_groups staleness/mean staleness/max staleness/hist_0
        loss/total loss/policy kl/behavior policy/entropy optim/lr optim/grad_norm optim/nonfinite_steps time/step
        time/wait_batch time/train time/publish idle/learner perf/trained_tokens_per_s perf/groups_per_s
        completion/length_mean completion/truncated replay/trained weights/gather_s weights/bytes
        eval/heldout/accuracy eval/heldout/count eval/heldout/version_min eval/heldout/version_max"""
    assert set(names.split()) <= row.keys()
    assert all(math.isfinite(value) for value in row.values())
    assert row["staleness/max"] <= 2
    assert sum(value for name, value in row.items() if name.startswith("staleness/hist_")) == pytest.approx(1.0)
    assert {"prompt", "completion", "reward"} <= rows.sampled[0].keys()


def test_the_export_holds_the_last_published_weights(tmp_path: Path):
    config = make_config(tmp_path)
    publisher, _ = run(config, FedReplay())
    exported = dict(AutoModelForCausalLM.from_pretrained(Path(config.run.dir) / "hf").named_parameters())
    assert largest_difference({k: v.detach() for k, v in exported.items()}, publisher.newest) == 0.0


def test_training_raises_the_probability_of_rewarded_tokens(tmp_path: Path):
    config = make_config(tmp_path, lr=1e-2, steps=12)
    replay = FedReplay()
    once = replay.lease
    replay.lease = lambda *, step, rank, world, wait_s: once(step=0, rank=rank, world=world, wait_s=wait_s)  # pyright: ignore
    _, rows = run(config, replay)
    assert rows.rows[-1]["loss/policy"] < rows.rows[0]["loss/policy"]


def test_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path):
    undisturbed, _ = run(make_config(tmp_path / "a"), FedReplay())
    config = make_config(tmp_path / "b")
    replay = FedReplay(steps=5)
    with pytest.raises(NoProgress):
        run(config, replay)
    again = FedReplay()
    again.next_version = 6
    resumed, rows = run(config, again, resume=True)
    assert again.named("restore") == [(3, 4, {"step": 3, "tree": {3: 2}})]
    assert again.named("publish") == [(6, 4)]
    assert again.named("trained") == [(4, 7), (5, 8)]
    assert [row["step"] for row in rows.rows] == [5, 6]
    assert largest_difference(undisturbed.newest, resumed.newest) == 0.0


def test_micro_batch_size_does_not_change_what_is_learned(tmp_path: Path):
    small, _ = run(make_config(tmp_path / "small", max_tokens_per_microbatch=30), FedReplay())
    large, _ = run(make_config(tmp_path / "large", max_tokens_per_microbatch=10_000), FedReplay())
    assert largest_difference(small.newest, large.newest) < 1e-5


def test_two_updates_per_batch_take_two_optimizer_steps(tmp_path: Path):
    one, _ = run(make_config(tmp_path / "one", steps=1), FedReplay())
    two, _ = run(make_config(tmp_path / "two", steps=1, updates_per_batch=2), FedReplay())
    start = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "model").named_parameters())
    start = {name: tensor.detach() for name, tensor in start.items()}
    assert largest_difference(start, one.newest) <= 1.001e-3 < largest_difference(start, two.newest)


def test_a_decoupled_loss_keeps_its_anchor_over_the_updates_of_a_batch(tmp_path: Path):
    config = make_config(tmp_path, updates_per_batch=2)
    config.loss.preset = "decoupled_ppo"
    _, rows = run(config, FedReplay())
    assert rows.rows[0]["ratio/U/rms_log_ratio"] > 0


def test_a_poisoned_step_is_skipped_and_the_run_goes_on(tmp_path: Path):
    config = make_config(tmp_path)
    replay = FedReplay()
    replay.poisoned = {1}
    publisher, rows = run(config, replay)
    assert [row["optim/nonfinite_steps"] for row in rows.rows[:3]] == [0, 1, 1]
    assert publisher.versions == list(range(7))
    assert all(torch.isfinite(tensor).all() for tensor in publisher.newest.values())
    assert (Path(config.run.dir) / "nonfinite" / "step_1.npz").exists()


def test_too_many_poisoned_steps_end_the_run(tmp_path: Path):
    replay = FedReplay()
    replay.poisoned = {1, 2}
    with pytest.raises(NonFiniteError, match="2 optimizer steps in a row"):
        run(make_config(tmp_path), replay)


def test_a_replay_that_runs_dry_ends_the_run_in_time(tmp_path: Path):
    began = time.monotonic()
    with pytest.raises(NoProgress, match="waited for rollout workers"):
        run(make_config(tmp_path), FedReplay(steps=2))
    assert time.monotonic() - began < 60


def test_a_full_disk_ends_the_run_with_the_path(tmp_path: Path):
    config = make_config(tmp_path)
    Path(config.run.dir).mkdir(parents=True)
    (Path(config.run.dir) / "ckpt").write_text("no folder can be made here")
    with pytest.raises(CheckpointError, match="ckpt/step_2"):
        run(config, FedReplay())


class KnownVersions(KeptWeights):
    """Keeps, for each version sent, whether the replay knew of it then."""

    def __init__(self, replay: FedReplay) -> None:
        super().__init__()
        self.known: list[bool] = []
        self._replay = replay

    def publish(self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> PublishStats:
        self.known.append(policy_version < self._replay.next_version)
        return super().publish(policy_version, tensors)


def test_no_version_is_sent_before_the_replay_knows_it_so_that_none_is_used_twice_after_a_death(tmp_path: Path):
    replay = FedReplay()
    publisher = KnownVersions(replay)
    run(make_config(tmp_path), replay, publisher=publisher)
    assert publisher.known == [True] * 7


class EveryWeights(KeptWeights):
    """Keeps all versions; `late`: copied as late as the publisher may, when it is waited for."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.open: list[tuple[int, list[tuple[str, torch.Tensor]]]] = []
        self.every: dict[int, dict[str, torch.Tensor]] = {}

    def publish(self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> PublishStats:
        assert not self.open, "a version was not waited for"
        self.open.append((policy_version, list(tensors)))
        if not self.late:
            self.wait_copied()
        return PublishStats(wait_previous_s=0.0, nbytes=0)

    def wait_copied(self) -> float:
        for policy_version, tensors in self.open:
            super().publish(policy_version, tensors)
            self.every[policy_version] = self.newest
        self.open = []
        return 0.0


@pytest.mark.parametrize("updates", [1, 2])
def test_weights_that_are_copied_beside_the_next_step_are_those_of_their_version(tmp_path: Path, updates: int):
    kept = {}
    for late in (False, True):
        config = make_config(tmp_path / str(late), updates_per_batch=updates)
        publisher, _ = run(config, FedReplay(), publisher=EveryWeights(late))
        assert isinstance(publisher, EveryWeights) and publisher.versions == list(range(7)) and not publisher.open
        kept[late] = publisher.every
    for version in range(7):
        assert largest_difference(kept[False][version], kept[True][version]) == 0.0, version
        assert version == 0 or largest_difference(kept[True][version - 1], kept[True][version]) > 0.0, version


class FailingCopy(KeptWeights):
    """Whose copy of one version fails."""

    def wait_copied(self) -> float:
        if self.versions[-1] == 1:
            raise WeightsError("version 1 could not be copied")
        return 0.0


def test_a_copy_that_fails_beside_a_skipped_step_ends_the_run_before_a_further_version_is_announced(tmp_path: Path):
    replay = FedReplay()
    replay.poisoned = {1}
    publisher = FailingCopy()
    with pytest.raises(WeightsError, match="version 1 could not be copied"):
        run(make_config(tmp_path), replay, publisher=publisher)
    assert replay.named("trained") == [(0, 1)]
    assert publisher.versions == [0, 1]


def test_an_evaluation_of_which_every_row_failed_has_no_accuracy():
    summary = EvalSummary(
        job_id=0, step=4, eval_set="heldout", accuracy=0.0, count=0, failed=8, version_min=4, version_max=4
    )
    row = evaluation_metrics([summary])
    assert "eval/heldout/accuracy" not in row
    assert row["eval/heldout/failed"] == 8.0
