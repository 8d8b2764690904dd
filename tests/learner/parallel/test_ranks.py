from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.losses import LossConfig
from asyncrl.schema import AdvantageConfig, Config, EvalConfig, ModelConfig
from tests.learner.fed_replay import largest_difference
from tests.learner.feed import tiny_checkpoint
from tests.learner.rank_process import train_on_ranks
from tests.learner.smooth_steps import EQUAL, RATE, apart
from tests.learner.tiny_config import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(900)]


def make_config(folder: Path, run: str, **learner: Any) -> Config:
    return tiny_config(
        folder,
        run,
        kv_heads=2,
        learner={"steps": 4, "lr": RATE, "save_every": 2} | learner,
        loss=LossConfig(entropy_coef=0.05),
        eval=EvalConfig(path="heldout.jsonl"),  # rank 0 waits for the last one, the others with it
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the finished runs `one` and `two`, of one and of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    train_on_ranks(make_config(folder, "one"), 1)
    train_on_ranks(make_config(folder, "two"), 2)
    return folder


def published(folder: Path, run: str) -> dict[str, torch.Tensor]:
    return load_file(folder / run / "published.safetensors")


def first(folder: Path, run: str) -> dict[str, torch.Tensor]:
    return load_file(folder / run / "first.safetensors")


def test_two_ranks_learn_the_same_weights_as_one(folder: Path):
    assert apart(published(folder, "one"), published(folder, "two"), first(folder, "one")) < EQUAL


def test_two_ranks_report_the_same_numbers_as_one(folder: Path):
    is_reported(folder, "one", "two")


def is_reported(folder: Path, *runs: str) -> None:
    one, two = (load_file(folder / run / "row.safetensors") for run in runs)
    # Whether a save beside the steps has ended by now is a matter of time, too.
    of_time = ("time/", "perf/", "idle/", "checkpoint/")
    assert {*one} ^ {*two} <= {name for name in {*one, *two} if name.startswith(of_time)}
    for name in one:
        if not name.startswith(of_time):
            assert one[name].item() == pytest.approx(two[name].item(), abs=1e-4, rel=1e-3), name


def test_what_is_offloaded_learns_the_same_is_saved_and_goes_on_without(folder: Path):
    """Weights, gradients and moments in host memory, then the moments alone."""
    train_on_ranks(make_config(folder, "offload", offload="all", steps=2), 2)
    train_on_ranks(make_config(folder, "offload", offload="optimizer"), 2, resume=True)
    assert apart(published(folder, "one"), published(folder, "offload"), first(folder, "one")) < EQUAL
    is_exported(folder, "offload")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"ranks": 2, "offload": "all"}, {"ranks": 4, "tensor_parallel": 2}, id="to compute together"),
        pytest.param({"ranks": 4, "tensor_parallel": 2}, {"ranks": 1}, id="computing together", marks=pytest.mark.long),
        pytest.param({"ranks": 4, "replicas": 2}, {"ranks": 3}, id="uneven", marks=pytest.mark.long),
    ],
)
def test_moments_in_8_bits_are_read_by_any_layout_to_the_bit(
    folder: Path, before: dict[str, Any], after: dict[str, Any], request: pytest.FixtureRequest
):
    """Codes and scales; then each goes on training."""
    wide = tiny_checkpoint(folder / "wide", hidden_size=64, intermediate_size=128, num_key_value_heads=2)

    def given(**learner: Any) -> Config:
        config = make_config(folder, f"8 bits, {request.node.callspec.id}", optimizer="adamw_8bit", **learner)
        return replace(config, model=ModelConfig(path=str(wide)))

    train_on_ranks(given(steps=2, **before), before["ranks"])
    saved = load_file(folder / given().run.dir / "moments.safetensors")
    train_on_ranks(given(**after), after["ranks"], resume=True)
    read = load_file(folder / given().run.dir / "begun_moments.safetensors")
    assert sum(name.endswith("exp_avg_scale") for name in saved) > 5
    assert saved.keys() == read.keys() and all(torch.equal(saved[name], read[name]) for name in saved)
    learned = load_file(folder / given().run.dir / "learned.safetensors")
    begun = load_file(folder / given().run.dir / "begun.safetensors")
    assert largest_difference(learned, begun) > 0


def test_an_export_of_sharded_weights_is_whole(folder: Path):
    is_exported(folder, "two")


def is_exported(folder: Path, run: str) -> None:
    exported = AutoModelForCausalLM.from_pretrained(folder / run / "hf").named_parameters()
    weights = {name: tensor.detach() for name, tensor in exported}
    assert largest_difference(weights, published(folder, run)) == 0.0


def test_ranks_that_compute_layers_together_learn_report_and_export_the_same(folder: Path):
    together = train_on_ranks(make_config(folder, "together", ranks=4, tensor_parallel=2), 4)
    assert apart(published(folder, "one"), together, first(folder, "one")) < EQUAL
    is_reported(folder, "one", "together")
    is_exported(folder, "together")


def test_ranks_that_share_sequences_learn_report_and_export_the_same(folder: Path):
    shared = train_on_ranks(make_config(folder, "shared", ranks=4, sequence_parallel=2), 4)
    assert apart(published(folder, "one"), shared, first(folder, "one")) < EQUAL
    is_reported(folder, "one", "shared")
    is_exported(folder, "shared")


def test_ranks_that_spread_experts_learn_publish_and_export_the_same_and_are_resumed_by_one(folder: Path):
    mixture = tiny_checkpoint(folder / "mixture", "qwen3_moe")

    def given(run: str, **learner: Any) -> Config:
        return replace(make_config(folder, run, **learner), model=ModelConfig(path=str(mixture)))

    alone = train_on_ranks(given("alone"), 1)
    train_on_ranks(given("spread", steps=2, expert_parallel=2), 4)
    is_exported(folder, "spread")
    saved = states(folder, "spread", "learned", "moments")
    resumed = train_on_ranks(given("spread"), 1, resume=True)
    assert list(map(largest_difference, saved, states(folder, "spread", "begun", "begun_moments"))) == [0.0, 0.0]
    assert apart(alone, resumed, first(folder, "alone")) < EQUAL


def states(folder: Path, run: str, *names: str) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / run / f"{name}.safetensors") for name in names]


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"ranks": 2}, {"ranks": 1}, id="fewer"),
        pytest.param({"ranks": 4, "replicas": 2}, {"ranks": 2}, id="one copy of two"),
        pytest.param({"ranks": 1}, {"ranks": 2}, id="more", marks=LONG),
        pytest.param({"ranks": 4, "tensor_parallel": 2}, {"ranks": 2}, id="computing together", marks=LONG),
        pytest.param({"ranks": 2}, {"ranks": 4, "tensor_parallel": 2}, id="to compute together", marks=LONG),
        pytest.param({"ranks": 2}, {"ranks": 4, "replicas": 2}, id="two copies of one", marks=LONG),
        pytest.param({"ranks": 2, "sequence_parallel": 2}, {"ranks": 1}, id="sharing sequences", marks=LONG),
        pytest.param({"ranks": 2}, {"ranks": 4, "sequence_parallel": 2}, id="to share sequences", marks=LONG),
    ],
)
def test_a_checkpoint_resumes_on_another_layout(
    folder: Path, before: dict[str, int], after: dict[str, int], request: pytest.FixtureRequest
):
    run = f"resumed, {request.node.callspec.id}"
    train_on_ranks(make_config(folder, run, steps=2, **before), before["ranks"])
    saved = states(folder, run, "learned", "moments")
    resumed = train_on_ranks(make_config(folder, run, **after), after["ranks"], resume=True)
    read = states(folder, run, "begun", "begun_moments")
    # What is read is what was saved, to the bit; what differs later is the order in which the ranks add up: so far it
    # was the last bit of a weight of 1, 6e-8, as between runs of those layouts that never stopped.
    assert [largest_difference(*pair) for pair in zip(saved, read, strict=True)] == [0.0, 0.0]
    assert largest_difference(published(folder, "two"), resumed) <= 1e-6
    assert apart(published(folder, "two"), resumed, first(folder, "two")) < EQUAL


def test_gradients_that_meet_with_every_micro_batch_are_the_same(folder: Path):
    each = train_on_ranks(make_config(folder, "each", reduce_gradients="each"), 2)
    assert apart(published(folder, "two"), each, first(folder, "two")) < EQUAL


def test_activation_checkpointing_changes_nothing(folder: Path):
    config = make_config(folder, "checkpointed")
    config.model.activation_checkpointing = True
    assert apart(published(folder, "two"), train_on_ranks(config, 2), first(folder, "two")) < EQUAL


def test_several_updates_per_batch_learn_the_same_on_any_number_of_ranks(folder: Path):
    one = train_on_ranks(make_config(folder, "one_twice", updates_per_batch=2), 1)
    two = train_on_ranks(make_config(folder, "two_twice", updates_per_batch=2), 2)
    assert apart(one, two, first(folder, "one_twice")) < EQUAL


def test_a_rank_that_has_nothing_to_train_joins_all_the_same(folder: Path):
    one_config, two_config = make_config(folder, "one_lonely"), make_config(folder, "two_lonely")
    for config in (one_config, two_config):
        config.advantage = AdvantageConfig(baseline="none")  # Against its siblings, one alone would move no weight.
    one = train_on_ranks(one_config, 1, groups=1, size=1)
    two = train_on_ranks(two_config, 2, groups=1, size=1)
    assert apart(one, two, first(folder, "one_lonely")) < EQUAL


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(folder: Path):
    config = make_config(folder, "half")
    config.model.dtype = "bfloat16"
    weights = train_on_ranks(config, 1)
    row, exact = (load_file(folder / run / "row.safetensors") for run in ("half", "one"))
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert math.isclose(row["policy/entropy"].item(), exact["policy/entropy"].item(), abs_tol=0.1)
    assert 0 < largest_difference(weights, published(folder, "one")) < 0.02
