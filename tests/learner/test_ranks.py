from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.config import Config, LearnerConfig, ModelConfig, RunConfig
from tests.learner.fed_replay import largest_difference
from tests.learner.feed import tiny_checkpoint
from tests.learner.rank_process import train_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def make_config(folder: Path, run: str, **learner: int) -> Config:
    model = folder / "model"
    if not model.exists():
        tiny_checkpoint(model)
    settings = {"steps": 4, "lr": 1e-3, "save_every": 2, "max_tokens_per_microbatch": 60}
    return Config(
        run=RunConfig(dir=str(folder / run)),
        model=ModelConfig(path=str(model)),
        learner=LearnerConfig(**(settings | learner)),
    )


@pytest.mark.parametrize("updates", [1, 2])
def test_two_ranks_learn_the_same_weights_as_one(tmp_path: Path, updates: int):
    one = train_on_ranks(make_config(tmp_path, "one", updates_per_batch=updates), 1)
    two = train_on_ranks(make_config(tmp_path, "two", updates_per_batch=updates), 2)
    assert largest_difference(one, two) < 1e-5


def test_two_ranks_report_the_same_numbers_as_one(tmp_path: Path):
    train_on_ranks(make_config(tmp_path, "one"), 1)
    train_on_ranks(make_config(tmp_path, "two"), 2)
    one, two = (load_file(tmp_path / run / "row.safetensors") for run in ("one", "two"))
    timed = ("time/", "perf/", "idle/")
    assert one.keys() == two.keys()
    for name in one:
        if not name.startswith(timed):
            assert one[name].item() == pytest.approx(two[name].item(), abs=1e-4, rel=1e-3), name


def test_a_rank_that_has_nothing_to_train_joins_all_the_same(tmp_path: Path):
    one = train_on_ranks(make_config(tmp_path, "one"), 1, groups=1, size=1)
    two = train_on_ranks(make_config(tmp_path, "two"), 2, groups=1, size=1)
    assert largest_difference(one, two) < 1e-5


def test_activation_checkpointing_changes_nothing(tmp_path: Path):
    plain = train_on_ranks(make_config(tmp_path, "plain"), 2)
    config = make_config(tmp_path, "checkpointed")
    config.model.activation_checkpointing = True
    assert largest_difference(plain, train_on_ranks(config, 2)) < 1e-6


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_resumes_on_another_number_of_ranks(tmp_path: Path, before: int, after: int):
    undisturbed = train_on_ranks(make_config(tmp_path, "whole"), 2)
    train_on_ranks(make_config(tmp_path, "resumed", steps=2), before)
    resumed = train_on_ranks(make_config(tmp_path, "resumed"), after, resume=True)
    assert largest_difference(undisturbed, resumed) < 1e-5


def test_an_export_of_sharded_weights_is_whole(tmp_path: Path):
    published = train_on_ranks(make_config(tmp_path, "two"), 2)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "hf").named_parameters()
    assert largest_difference({name: tensor.detach() for name, tensor in exported}, published) == 0.0
