"""A step that does not fit is tried once more with half the micro-batch, by all ranks from the checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl.checks.parallel import LAID_OUT_BY
from asyncrl.errors import ConfigError, StepMemoryError, UserCodeError
from asyncrl.learner import train as train_module
from asyncrl.learner.processes.launcher import HOPELESS
from asyncrl.learner.processes.out_of_memory import _of, heed_note, holds_less, lowers_most, memory_named, one_more_try
from tests.learner.fed_replay import FedReplay
from tests.learner.test_train import CPU, make_config, run


def test_the_micro_batch_is_halved_once_and_then_the_run_ends_with_the_setting_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, step = make_config(tmp_path), train_module.train_step
    fits = 40

    def fitted(config, roles, guard, lease, **named):
        if lease.plan.step >= 3 and config.learner.max_tokens_per_microbatch > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return step(config, roles, guard, lease, **named)

    monkeypatch.setattr(train_module, "train_step", fitted)
    first = FedReplay()
    with pytest.raises(StepMemoryError, match=r"max_tokens_per_microbatch=60: CUDA out of memory\. All ranks"):
        run(config, first)
    assert not isinstance(StepMemoryError(), HOPELESS), "torchrun is to start the ranks again"
    assert first.named("commit") in ([], [1]), "it is durable by the end, and a resume finds it, told or not"
    again = FedReplay()
    again.next_version = 4
    run(config, again, resume=True)
    assert config.learner.max_tokens_per_microbatch == 30 and [step for step, _ in again.named("trained")] == [
        2,
        3,
        4,
        5,
    ]

    fits = 0
    other = make_config(tmp_path)
    third = FedReplay()
    third.next_version = 9
    other.learner.steps = 8
    with pytest.raises(
        ConfigError, match=r"half the micro-batch too \(30 tokens\).* model\.activation_checkpointing=true"
    ):
        run(other, third, resume=True)
    fresh = make_config(tmp_path, max_tokens_per_microbatch=20)
    heed_note(fresh, Path(fresh.run.dir), 0, CPU)
    assert fresh.learner.max_tokens_per_microbatch == 20, "the user has lowered it further already"
    fresh = make_config(tmp_path)
    fresh.model.activation_checkpointing = True
    heed_note(fresh, Path(fresh.run.dir), 0, CPU)
    assert fresh.learner.max_tokens_per_microbatch == 60, "the note is of other settings"


@pytest.mark.parametrize(
    "told",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_memory_that_others_than_torch_ask_for_counts_too(told: str, tmp_path: Path):
    config = make_config(tmp_path)
    first, *_ = told.splitlines()
    with (
        pytest.raises(StepMemoryError, match=rf"=60: {re.escape(first)}\. All"),
        one_more_try(config, tmp_path / "run", 0),
    ):
        raise RuntimeError(told)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: illegal access"), UserCodeError("out of memory")])
def test_other_errors_of_a_step_stay_what_they_are(error: RuntimeError, tmp_path: Path):
    with pytest.raises(type(error)) as found, one_more_try(make_config(tmp_path), tmp_path / "run", 0):
        raise error
    assert found.value is error


def test_what_lowers_memory_most_is_named_in_turn(tmp_path: Path):
    config = make_config(tmp_path)
    config.model.activation_checkpointing, config.model.checkpoint_every = True, 2
    assert "model.checkpoint_every=1" in lowers_most(config)
    whole = _of(config)
    config.model.checkpoint_every = 1
    assert _of(config) != whole, "the note of the other does not hold for it"
    assert "learner.offload=all" in lowers_most(config)
    whole = _of(config)
    config.learner.offload = "all"
    assert _of(config) != whole
    whole = _of(config)
    for dim in LAID_OUT_BY:
        assert _of(replace(config, learner=replace(config.learner, **{dim: 2}))) != whole, dim
    assert "more learner.ranks" in lowers_most(config)


def test_whatever_else_runs_out_of_memory_names_what_the_models_hold(tmp_path: Path):
    config = make_config(tmp_path)
    said = r"rank 3 ran out of memory outside of a step.* 9 GiB\. What.*learner\.offload=optimizer"
    with pytest.raises(ConfigError, match=said), memory_named(config, 3):
        raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate 9 GiB. GPU 0 has none")
    assert isinstance(ConfigError(), HOPELESS), "no restart helps"
    with pytest.raises(RuntimeError, match="shape"), memory_named(config, 0):
        raise RuntimeError("a shape is wrong")
    with pytest.raises(StepMemoryError), memory_named(config, 0):
        raise StepMemoryError("a step")


def test_what_the_models_hold_is_lowered_by_settings_that_are_not_set_yet(tmp_path: Path):
    config, said = make_config(tmp_path), list[str]()
    for changes in ({}, {"offload": "optimizer"}, {"offload": "all"}, {"offload": "all", "optimizer": "adamw_8bit"}):
        said.append(holds_less(replace(config, learner=replace(config.learner, **changes))).split(" ")[0])
    assert said == ["learner.offload=optimizer", "learner.offload=all", "learner.optimizer=adamw_8bit", "more"]
