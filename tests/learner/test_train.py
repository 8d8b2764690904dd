from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import CheckpointError, NonFiniteError, NoProgress, WeightsError
from asyncrl.evaluation.orders import EvalSummary
from asyncrl.learner import train as train_module
from asyncrl.learner.processes.stop import Asked, never
from asyncrl.learner.reporting.step_clock import StepClock
from asyncrl.learner.reporting.step_row import evaluation_metrics, write_evaluations
from asyncrl.learner.train import Training
from asyncrl.replay.protocol import Lease, TrainedReply
from asyncrl.schema import Config, EvalConfig
from asyncrl.settings.replay import ReplayConfig
from asyncrl.storage.checkpoints import trained_in
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import PublishStats
from tests.learner.alone import train_alone
from tests.learner.fed_replay import FedReplay, KeptRows, KeptWeights, largest_difference
from tests.learner.smooth_steps import EQUAL, MAKER, RATE, apart, make_smooth_optimizer
from tests.learner.tiny_config import tiny_config

CPU = torch.device("cpu")


def make_config(folder: Path, **learner: Any) -> Config:
    settings = {"steps": 6, "lr": 1e-3, "save_every": 2, "max_nonfinite_steps": 1} | learner
    return tiny_config(
        folder,
        learner=settings,
        replay=ReplayConfig(wait_timeout_s=0.2),
        eval=EvalConfig(every=4, path="heldout.jsonl"),
    )


def run(
    config: Config,
    replay: FedReplay,
    resume: bool = False,
    publisher: KeptWeights | None = None,
    asked: Asked = never,
) -> tuple[KeptWeights, KeptRows]:
    publisher = publisher or KeptWeights()
    return publisher, train_alone(config, replay, publisher, resume=resume, asked=asked)[1]


def test_no_weights_leave_before_the_replay_knows_their_version_and_a_canary_is_made_while_it_answers(tmp_path: Path):
    canary_made, answered = threading.Event(), list[int]()

    class Replay(FedReplay):
        def trained(self, *, step: int, policy_version: int) -> TrainedReply:
            assert canary_made.wait(30), "the learner waits for the answer before it makes the canary"
            canary_made.clear()
            reply = super().trained(step=step, policy_version=policy_version)
            answered.append(policy_version)
            return reply

    class Weights(KeptWeights):
        def publish(self, policy_version, tensors, canary=None):
            if policy_version:
                canary_made.set()
            made = super().publish(policy_version, tensors, canary)
            assert answered == list(range(1, policy_version + 1)), "they were read before"
            return made

    weights = Weights()
    run(make_config(tmp_path), Replay(), publisher=weights)
    assert weights.versions == list(range(7))


def test_asked_to_stop_it_saves_what_it_trained_and_does_not_finish_the_run(tmp_path: Path):
    replay = FedReplay()
    _, rows = run(make_config(tmp_path), replay, asked=lambda: len(replay.named("trained")) >= 3)
    assert [row["step"] for row in rows.rows] == [1, 2, 3]
    assert replay.named("commit") == [1, 2], "step 2 was due, step 3 is saved because it ends"
    assert not replay.named("finish")
    again = FedReplay()
    again.next_version = 4
    run(make_config(tmp_path), again, resume=True, asked=lambda: len(again.named("trained")) >= 1)
    assert again.named("trained") == [(3, 5)]
    assert again.named("commit") == [3], "saved once, though it was due and asked for"


def test_ranks_that_start_again_because_a_machine_joined_go_on_where_they_were(tmp_path: Path):
    config = make_config(tmp_path)
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    (Path(config.run.dir) / "run.json").write_text('{"run_id": "alone", "origin": "alone"}')
    replay = FedReplay()
    run(config, replay, asked=lambda: len(replay.named("trained")) >= 2)
    again = FedReplay()
    again.next_version = 3
    run(config, again)
    assert again.named("trained")[0][0] == 2, "from step 0, though nothing had been lost"


def test_asked_before_anything_is_trained_it_saves_nothing(tmp_path: Path):
    replay = FedReplay()
    run(make_config(tmp_path), replay, asked=lambda: True)
    assert not replay.named("trained") and not replay.named("commit")


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
    assert [(row["step"], row["policy_version"]) for row in rows.evaluations] == [(0, 0), (4, 4), (6, 6)]


def test_a_step_without_a_fresh_token_has_a_row_of_the_same_names(tmp_path: Path):
    _, rows = run(make_config(tmp_path), FedReplay(groups=1, size=1))
    without = [row for row in rows.rows if row["perf/trained_tokens_per_s"] == 0]
    assert without, "the feed has one"
    for name in ("optim/lr", "optim/grad_norm", "loss/total"):
        assert all(row[name] == 0 for row in without)


def test_the_laps_of_a_step_add_up_to_it_and_the_steps_to_all_of_the_time() -> None:
    seconds = iter(range(100))
    clock = StepClock(now=lambda: float(next(seconds)))
    clock.start()
    steps = []
    for laps in (("wait_batch", "train"), ("log", "checkpoint", "wait_batch", "train"), ("log", "train")):
        for name in laps:
            clock.lap(name)
        steps.append(clock.next())
    assert all(sum(row.values()) == 2 * row["time/step"] for row in steps)
    assert sum(row["time/step"] for row in steps) == 8 == next(seconds) - 1
    assert "time/checkpoint" not in steps[2]


def test_the_row_of_a_run_tells_where_all_of_its_time_went(tmp_path: Path):
    _, kept = run(make_config(tmp_path, steps=3), FedReplay())
    for row in kept.rows:
        laps = [seconds for name, seconds in row.items() if name.startswith("time/") and name != "time/step"]
        assert sum(laps) == pytest.approx(row["time/step"])


def test_a_step_has_its_row_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed in between it would never be trained again, nor its row written."""
    rows: list[tuple[int, int]] = []
    save = train_module.begin_save

    def saved(parts: Training, step: int, *given: Any, **named: Any) -> None:
        assert isinstance(parts.log, KeptRows)
        rows.append((step + 1, int(parts.log.rows[-1]["step"])))
        save(parts, step, *given, **named)

    monkeypatch.setattr(train_module, "begin_save", saved)
    _, kept = run(make_config(tmp_path), FedReplay())
    assert rows == [(2, 2), (4, 4), (6, 6)]
    assert "time/checkpoint" in kept.rows[2] and "time/checkpoint" not in kept.rows[1]


def test_a_row_has_what_the_documentation_names(tmp_path: Path):
    _, rows = run(make_config(tmp_path), FedReplay())
    row = rows.rows[0]
    names = """reward/mean reward/std reward/zero_variance_groups staleness/mean staleness/max staleness/hist_0
        loss/total loss/policy kl/behavior policy/entropy optim/lr optim/grad_norm optim/nonfinite_steps time/step
        time/wait_batch time/train time/publish idle/learner perf/trained_tokens_per_s perf/groups_per_s
        completion/length_mean completion/truncated replay/trained weights/gather_s weights/bytes"""
    assert set(names.split()) <= row.keys()
    assert all(math.isfinite(value) for value in row.values())
    assert row["staleness/max"] <= 2
    assert sum(value for name, value in row.items() if name.startswith("staleness/hist_")) == pytest.approx(1.0)
    assert {"prompt", "completion", "reward"} <= rows.sampled[0].keys()
    of_a_set = ("reward", "count", "failed", "version_min", "version_max", "superseded")
    assert {f"eval/heldout/{name}" for name in of_a_set} <= rows.evaluations[0].keys()


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


class CutOffReplay(FedReplay):
    """A replay whose connection breaks after its last step: a learner ends without saving, as if it had died."""

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        if step >= self._steps:
            raise ConnectionResetError("cut off")
        return super().lease(step=step, rank=rank, world=world, wait_s=wait_s)


def test_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path):
    undisturbed, _ = run(make_config(tmp_path / "a"), FedReplay())
    config = make_config(tmp_path / "b")
    with pytest.raises(ConnectionResetError):
        run(config, CutOffReplay(steps=5))
    again = FedReplay()
    again.next_version = 6
    resumed, rows = run(config, again, resume=True)
    assert again.named("restore") == [(3, 4, {"step": 3, "tree": {3: 2}})]
    assert again.named("publish") == [(6, 4)]
    assert again.named("trained") == [(4, 7), (5, 8)]
    assert [row["step"] for row in rows.rows] == [5, 6]
    assert largest_difference(undisturbed.newest, resumed.newest) == 0.0


def test_a_resume_to_fewer_steps_than_are_trained_exports_them_all(tmp_path: Path):
    run(make_config(tmp_path), FedReplay())
    again = FedReplay()
    again.next_version = 7
    _, rows = run(make_config(tmp_path, steps=2), again, resume=True)
    assert not rows.rows and trained_in(tmp_path / "run" / "hf") == 6


def test_micro_batch_size_does_not_change_what_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MAKER, make_smooth_optimizer)
    small, _ = run(make_config(tmp_path / "small", lr=RATE, max_tokens_per_microbatch=30), FedReplay())
    large, _ = run(make_config(tmp_path / "large", lr=RATE, max_tokens_per_microbatch=10_000), FedReplay())
    assert apart(small.newest, large.newest, large.first) < EQUAL


def test_two_updates_per_batch_take_two_optimizer_steps(tmp_path: Path):
    one, _ = run(make_config(tmp_path / "one", steps=1), FedReplay())
    two, _ = run(make_config(tmp_path / "two", steps=1, updates_per_batch=2), FedReplay())
    start = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "model").named_parameters())
    start = {name: tensor.detach() for name, tensor in start.items()}
    assert largest_difference(start, one.newest) <= 1.01e-3 < largest_difference(start, two.newest)


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
    assert (Path(config.run.dir) / "nonfinite" / "step_2.npz").exists(), "as the row that counts it"


def test_too_many_poisoned_steps_end_the_run(tmp_path: Path):
    replay = FedReplay()
    replay.poisoned = {1, 2}
    with pytest.raises(NonFiniteError, match="2 optimizer steps in a row"):
        run(make_config(tmp_path), replay)


def test_a_replay_that_runs_dry_ends_the_run(tmp_path: Path):
    with pytest.raises(NoProgress, match="waited for rollout workers"):
        run(make_config(tmp_path), FedReplay(steps=2))


def test_a_learner_whose_workers_are_gone_saves_what_it_trained(tmp_path: Path):
    replay = FedReplay(steps=3)
    with pytest.raises(NoProgress, match="waited for rollout workers"):
        run(make_config(tmp_path), replay)
    assert replay.named("trained")[-1][0] == 2
    assert replay.named("commit") == [1, 2], "step 2 was due, step 3 is saved because the run ends"
    assert not replay.named("finish")
    again = FedReplay()
    again.next_version = 4
    run(make_config(tmp_path), again, resume=True, asked=lambda: len(again.named("trained")) >= 1)
    assert again.named("trained") == [(3, 5)]


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
            self.wait()
        return PublishStats(wait_previous_s=0.0, nbytes=0)

    def wait(self) -> float:
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

    def wait(self) -> float:
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
    assert publisher.failed, "a rank that sends its share would wait for rank 0, which waits for it"


def summary(**values: Any) -> EvalSummary:
    of_nothing = {"job_id": 0, "step": 4, "policy_version": 7, "eval_set": "heldout", "mean": 0.0, "count": 0}
    of_nothing |= {"failed": 8, "version_min": 7, "version_max": 7, "superseded": 0, "low": 0.0, "high": 0.0}
    return EvalSummary(**of_nothing | values)  # pyright: ignore


def test_an_evaluation_of_which_every_row_failed_has_no_mean():
    row = evaluation_metrics(summary(), "reward")
    assert not any("reward" in name for name in row)
    assert row["eval/heldout/failed"] == 8.0


def test_a_point_stands_at_the_step_whose_weights_it_measured_and_is_called_what_the_reward_says_it_is():
    rows = KeptRows()
    known = {"mean": 0.5, "low": 0.25, "high": 0.75, "count": 6, "failed": 2, "figures": {"pass@4": 0.75}}
    late = summary(**known, version_min=9, version_max=12)
    write_evaluations(rows, [summary(mean=0.25, count=8, failed=0), late], {"heldout": "accuracy"})
    assert [(row["step"], row["policy_version"], row["eval/heldout/accuracy"]) for row in rows.evaluations] == [
        (4, 7, 0.25),
        (6, 9, 0.5),
    ]
    assert rows.evaluations[1]["eval/heldout/version_max"] == 12.0
    assert rows.evaluations[1]["eval/heldout/pass@4"] == 0.75
    assert [rows.evaluations[1][f"eval/heldout/accuracy_{end}"] for end in ("low", "high")] == [0.25, 0.75]


@pytest.mark.parametrize(
    ("every", "path", "points"), [(0, "heldout.jsonl", [0, 4]), (2, "heldout.jsonl", [0, 2, 4]), (0, "", [])]
)
def test_with_a_path_the_first_and_the_last_weights_are_evaluated_and_each_has_its_row(
    tmp_path: Path, every: int, path: str, points: list[int]
):
    config = make_config(tmp_path, steps=4)
    config.eval = EvalConfig(every=every, path=path)
    _, rows = run(config, FedReplay())
    assert [row["step"] for row in rows.evaluations] == points


def test_each_set_has_its_own_interval(tmp_path: Path):
    config = make_config(tmp_path, steps=4)
    own = {"path": "b.jsonl", "every": 3, "rows": 7, "chunk": 2, "reward": {"function": "f1", "metric": "accuracy"}}
    config.eval = EvalConfig(every=2, path="a.jsonl", sets={"far": own, "seldom": {"path": "c.jsonl", "every": 0}})
    replay = FedReplay()
    _, rows = run(config, replay)
    assert [(step, name) for step, name, _, _ in replay.sets] == [
        *((0, "heldout"), (0, "far"), (0, "seldom"), (2, "heldout"), (3, "far")),
        *((4, "heldout"), (4, "far"), (4, "seldom")),
    ]
    assert {name: sizes for _, name, *sizes in replay.sets} == {
        **{"heldout": [256, 64], "far": [7, 2]},
        "seldom": [256, 64],
    }
    assert all(("eval/far/accuracy" in row) == ("eval/far/count" in row) for row in rows.evaluations)


class SilentReplay(FedReplay):
    """Whose evaluations never end."""

    def wait_evaluations(self, *, wait_s: float) -> tuple[EvalSummary, ...]:
        raise NoProgress("no row and no token for 0.2 s: 8 rows are open; rollout-0 for 9 s")


def test_an_evaluation_that_gets_nowhere_at_the_end_costs_its_point_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    replay = SilentReplay()
    run(make_config(tmp_path), replay)
    assert replay.calls[-1][0] == "finish" and replay.named("commit")[-1] == 5
    assert "the last evaluation is missing: no row and no token" in caplog.text
