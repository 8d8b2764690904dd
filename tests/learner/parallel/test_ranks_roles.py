"""Critic, reference, averaged policy and the advantages that need them, over several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.schema import AdvantageConfig, Config, CriticConfig
from asyncrl.settings.loss.keys import LossConfig
from tests.learner.parallel.test_ranks import make_config
from tests.learner.rank_process import train_on_ranks
from tests.learner.smooth_steps import EQUAL, RATE, apart

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(900)]


def gae(folder: Path, run: str, **learner: int) -> Config:
    """With all that may differ between ranks: whitening, KL in the reward, two updates, a warm-up step, an average."""
    config = make_config(folder, run, **({"updates_per_batch": 2} | learner))
    config.learner.proximal_ema = 0.5
    config.loss = LossConfig(preset="tis")
    config.advantage = AdvantageConfig(
        estimator="gae", baseline="none", std="batch", kl_coef=0.1, kl_target=0.05, kl_horizon=100.0
    )
    config.critic = CriticConfig(lr=RATE, warmup_steps=1, value_clip=0.2)
    return config


def reinforce_pp_baseline(folder: Path, run: str) -> Config:
    """Siblings on different ranks, and a learning rate that follows the effective sample size."""
    config = make_config(folder, run)
    config.loss = LossConfig(preset="vcpo", kl="k3", kl_coef=0.1)
    config.advantage = AdvantageConfig(estimator="reinforce_pp", baseline="mean", std="batch", kl_coef=0.1)
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the finished runs `gae_1`, `gae_2`, `reinforce_1` and `reinforce_2`, of one and of two ranks."""
    folder = tmp_path_factory.mktemp("roles")
    for world in (1, 2):
        train_on_ranks(gae(folder, f"gae_{world}"), world)
        train_on_ranks(reinforce_pp_baseline(folder, f"reinforce_{world}"), world)
    return folder


def learned(folder: Path, run: str) -> dict[str, torch.Tensor]:
    return load_file(folder / run / "learned.safetensors")


def begun(folder: Path, run: str) -> dict[str, torch.Tensor]:
    return load_file(folder / run / "begun.safetensors")


@pytest.mark.parametrize("make", ["gae", "reinforce"])
def test_two_ranks_learn_and_report_the_same_as_one(folder: Path, make: str):
    assert apart(learned(folder, f"{make}_1"), learned(folder, f"{make}_2"), begun(folder, f"{make}_1")) < EQUAL
    first, second = (load_file(folder / f"{make}_{world}" / "row.safetensors") for world in (1, 2))
    # Whether a save beside the steps has ended by now is a matter of time, too.
    of_time = ("time/", "perf/", "idle/", "checkpoint/")
    assert {*first} ^ {*second} <= {name for name in {*first, *second} if name.startswith(of_time)}
    for name in first:
        if not name.startswith(of_time):
            assert first[name].item() == pytest.approx(second[name].item(), abs=1e-3, rel=5e-3), name


def test_ranks_that_compute_layers_together_have_a_reference_and_an_average(folder: Path):
    one, together = (reinforce_pp_baseline(folder, run) for run in ("average", "together"))
    together.learner.tensor_parallel = 2
    for world, config in ((1, one), (2, together)):
        config.learner.proximal_ema = 0.5
        train_on_ranks(config, world)
    assert apart(learned(folder, "average"), learned(folder, "together"), begun(folder, "average")) < EQUAL


def test_ranks_that_share_sequences_have_a_critic_and_an_average(folder: Path):
    train_on_ranks(gae(folder, "shared", sequence_parallel=2), 2)
    assert any(name.startswith("critic.") for name in learned(folder, "shared"))
    assert apart(learned(folder, "gae_1"), learned(folder, "shared"), begun(folder, "gae_1")) < EQUAL


@pytest.mark.long
def test_ranks_that_compute_layers_together_have_a_critic(folder: Path):
    train_on_ranks(gae(folder, "together with a critic", tensor_parallel=2), 4)
    ends = [learned(folder, run) for run in ("gae_1", "together with a critic")]
    assert any(name.startswith("critic.") for name in ends[1])
    assert apart(ends[0], ends[1], begun(folder, "gae_1")) < EQUAL


def test_a_critic_and_an_average_resume_on_another_number_of_ranks(folder: Path):
    train_on_ranks(gae(folder, "cut", steps=2), 2)
    train_on_ranks(gae(folder, "cut"), 1, resume=True)
    assert any(name.startswith("critic.") for name in learned(folder, "cut"))
    assert apart(learned(folder, "gae_2"), learned(folder, "cut"), begun(folder, "gae_2")) < EQUAL


def test_a_rank_that_has_nothing_to_train_joins_the_critic_too(tmp_path: Path):
    config = gae(tmp_path, "lonely", updates_per_batch=1)
    train_on_ranks(config, 2, groups=1, size=1)
