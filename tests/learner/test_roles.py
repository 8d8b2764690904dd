"""The loop with a critic, a reference, an averaged policy and a controller, fed from a fixed order of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import CheckpointMismatchError, ConfigError, NonFiniteError, NoProgress
from asyncrl.learner.roles import Roles, build_roles
from asyncrl.schema import AdvantageConfig, Config, CriticConfig
from asyncrl.settings.loss.keys import LossConfig
from tests.learner.alone import train_alone
from tests.learner.fed_replay import FedReplay, KeptRows, KeptWeights, largest_difference
from tests.learner.smooth_steps import EQUAL, MAKER, RATE, apart, make_smooth_optimizer
from tests.learner.test_train import make_config

CPU = torch.device("cpu")


def ppo_gae(folder: Path, **learner: Any) -> Config:
    config = make_config(folder, **learner)
    config.loss = LossConfig(preset="ppo")
    config.advantage = AdvantageConfig(estimator="gae", baseline="none", std="batch")
    config.critic = CriticConfig(lr=1e-2)
    return config


def reinforce_pp(folder: Path, **learner: Any) -> Config:
    config = make_config(folder, **learner)
    config.loss = LossConfig(preset="reinforce_pp")
    config.advantage = AdvantageConfig(
        estimator="reinforce_pp", baseline="none", std="batch", kl_coef=0.1, kl_target=0.05, kl_horizon=100.0
    )
    return config


def averaged(folder: Path, **learner: Any) -> Config:
    config = make_config(folder, proximal_ema=0.5, **learner)
    config.loss = LossConfig(preset="decoupled_ppo")
    return config


def run(
    config: Config, replay: FedReplay | None = None, resume: bool = False, publisher: KeptWeights | None = None
) -> tuple[Roles, KeptWeights, KeptRows]:
    publisher = publisher or KeptWeights()
    parts, rows = train_alone(config, replay or FedReplay(), publisher, resume=resume)
    return parts.roles, publisher, rows


def weights(roles: Roles) -> dict[str, torch.Tensor]:
    """Of everything that is learned."""
    found = {f"{name}.{key}": p.detach() for name, model, _ in roles.trained() for key, p in model.named_parameters()}
    if roles.average is not None:
        found |= {f"average.{key}": p.detach() for key, p in roles.average.named_parameters()}
    return found


def one_batch(replay: FedReplay) -> FedReplay:
    """Serves step 0 at every step."""
    once = replay.lease
    replay.lease = lambda *, step, rank, world, wait_s: once(step=0, rank=rank, world=world, wait_s=wait_s)  # pyright: ignore
    return replay


def test_a_critic_learns_the_returns_of_a_batch_it_sees_again_and_again(tmp_path: Path):
    config = ppo_gae(tmp_path, steps=30, lr=1e-6, save_every=30)
    config.advantage.lam = 1.0  # the targets are then the rewards, whatever the critic says
    _, _, rows = run(config, one_batch(FedReplay()))
    assert rows.rows[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert rows.rows[-1]["critic/explained_variance"] > 0.8
    assert rows.rows[-1]["critic/loss"] < 0.3 * rows.rows[0]["critic/loss"]


def test_beside_adapters_the_critic_is_trained_whole_and_not_sent(tmp_path: Path):
    config = ppo_gae(tmp_path, steps=3, save_every=3)
    config.model.lora_rank = 4
    fresh = weights(build_roles(config, CPU, None))
    roles, publisher, _ = run(config)
    moved = {name for name, tensor in weights(roles).items() if not torch.equal(tensor, fresh[name])}
    assert {name for name in moved if name.startswith("policy")} == {n for n in fresh if "policy" in n and "lora" in n}
    assert {name for name in moved if name.startswith("critic")} == {name for name in fresh if "critic" in name}
    assert all("lora" in name or "rank_alpha" in name for name in publisher.newest)


def test_the_policy_stays_put_and_is_published_while_the_critic_warms_up(tmp_path: Path):
    config = ppo_gae(tmp_path, steps=3, save_every=3)
    config.critic.warmup_steps = 2
    started = {name: p.detach().clone() for name, p in build_roles(config, CPU, None).policy.named_hf_parameters()}
    kept: list[dict[str, torch.Tensor]] = []

    class Every(KeptWeights):
        def publish(self, policy_version: int, tensors: Any) -> Any:
            stats = super().publish(policy_version, tensors)
            kept.append(self.newest)
            return stats

    _, publisher, rows = run(config, publisher=Every())
    assert publisher.versions == [0, 1, 2, 3]
    assert largest_difference(started, kept[2]) == 0.0 < largest_difference(started, kept[3])
    assert [row["optim/lr"] for row in rows.rows] == [0.0, 0.0, 1e-3]
    assert all(row["critic/lr"] == 1e-2 and "kl/behavior" in row for row in rows.rows)


def test_the_reference_stays_at_the_initial_weights_and_the_kl_grows_from_zero(tmp_path: Path):
    config = make_config(tmp_path)
    config.loss = LossConfig(preset="grpo", kl="k3", kl_coef=0.1)
    roles, _, rows = run(config)
    fresh = build_roles(config, CPU, None)
    assert roles.reference is not None and fresh.reference is not None
    kept, initial = (dict(model.named_hf_parameters()) for model in (roles.reference, fresh.reference))
    assert largest_difference(kept, initial) == 0.0
    assert rows.rows[0]["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert rows.rows[-1]["loss/kl"] == pytest.approx(0.1 * rows.rows[-1]["kl/reference"], rel=0.5) != 0.0


@pytest.mark.parametrize("key", ["model", "reference"])
def test_a_model_that_cannot_be_loaded_is_named_by_its_setting(key: str, tmp_path: Path):
    config = make_config(tmp_path)
    config.loss = LossConfig(preset="grpo", kl="k3", kl_coef=0.1)
    getattr(config, key).path = str(tmp_path)
    with pytest.raises(ConfigError, match=f"^{key}.path={tmp_path} cannot be loaded as a causal LM"):
        build_roles(config, CPU, None)


def test_the_controller_moves_the_price_of_the_kl_towards_its_target(tmp_path: Path):
    config = reinforce_pp(tmp_path)
    _, _, rows = run(config)
    price = config.advantage.kl_coef
    for row in rows.rows:
        assert row["kl/coef"] == pytest.approx(price) and "kl/in_reward" in row
        error = min(max(row["kl/of_policy"] / config.advantage.kl_target - 1.0, -0.2), 0.2)
        price *= 1.0 + error * 16 / config.advantage.kl_horizon
    assert rows.rows[0]["advantage/std"] == pytest.approx(1.0, abs=1e-4)


def test_an_averaged_anchor_lies_between_the_old_and_the_new_policy(tmp_path: Path):
    roles, _, rows = run(averaged(tmp_path, steps=3))
    first, *_, last = (row["ratio/U/rms_log_ratio"] for row in rows.rows)
    assert first == pytest.approx(0.0, abs=1e-5)
    assert last > 1e-3
    assert roles.average is not None
    assert largest_difference(dict(roles.average.named_hf_parameters()), dict(roles.policy.named_hf_parameters())) > 0


def test_the_learning_rate_of_vcpo_follows_the_effective_sample_size(tmp_path: Path):
    config = make_config(tmp_path, schedule="constant")
    config.loss = LossConfig(preset="vcpo")
    _, _, rows = run(config)
    for row in rows.rows:
        assert row["optim/lr"] == pytest.approx(1e-3 * row["ratio/E/ess_seq"] ** 0.5, rel=1e-4)
    assert rows.rows[0]["optim/lr"] < 1e-3


@pytest.mark.parametrize("make", [ppo_gae, reinforce_pp, averaged])
def test_a_resumed_run_ends_with_all_the_weights_of_an_undisturbed_one(tmp_path: Path, make: Any):
    undisturbed, _, expected = run(make(tmp_path / "a"))
    config = make(tmp_path / "b")
    with pytest.raises(NoProgress):
        run(config, FedReplay(steps=5))
    again = FedReplay()
    again.next_version = 6
    resumed, _, rows = run(config, again, resume=True)
    assert largest_difference(weights(undisturbed), weights(resumed)) == 0.0
    assert resumed.kl_coef == undisturbed.kl_coef
    assert rows.rows[-1]["loss/total"] == expected.rows[-1]["loss/total"]


def test_the_price_of_a_kl_that_a_resume_brings_is_that_of_the_settings(tmp_path: Path):
    """The checkpoint knows of none, and factors do not move 0."""
    before = reinforce_pp(tmp_path, steps=2)
    before.advantage = AdvantageConfig(estimator="reinforce_pp", baseline="none", std="batch")
    run(before)
    again = FedReplay()
    again.next_version = 3
    _, _, rows = run(reinforce_pp(tmp_path, steps=3), again, resume=True)
    assert [row["kl/coef"] for row in rows.rows] == [0.1]


@pytest.mark.parametrize(
    ("saved", "resumed", "says"),
    [
        (make_config, ppo_gae, "saved without a critic, and these settings have one.*advantage.estimator"),
        (ppo_gae, make_config, "saved with a critic, and these settings have none.*advantage.estimator"),
        (averaged, make_config, "with an averaged policy, and these settings have none.*learner.proximal_ema"),
        (make_config, averaged, "without an averaged policy, and these settings have one"),
    ],
)
def test_a_checkpoint_resumes_only_a_run_with_the_same_models(tmp_path: Path, saved: Any, resumed: Any, says: str):
    run(saved(tmp_path, steps=2))
    with pytest.raises(CheckpointMismatchError, match=says):
        run(resumed(tmp_path), resume=True)


def test_a_refused_checkpoint_names_the_exported_models_that_exist_and_that_the_settings_use(tmp_path: Path):
    run(ppo_gae(tmp_path, steps=2))
    run_dir = Path(ppo_gae(tmp_path).run.dir)
    averaging = ppo_gae(tmp_path)
    averaging.learner.proximal_ema = averaged(tmp_path).learner.proximal_ema

    def refused(config: Config) -> str:
        with pytest.raises(CheckpointMismatchError) as caught:
            run(config, resume=True)
        return str(caught.value)

    assert f"start a new run with model.path={run_dir}/hf critic.path={run_dir}/critic" in refused(averaging)
    assert refused(make_config(tmp_path)).endswith(f"start a new run with model.path={run_dir}/hf"), "without a critic"
    for name in ("hf", "critic"):
        (run_dir / name).rename(run_dir / f"no_{name}")
    assert refused(averaging).endswith("Resume with the learner.proximal_ema it was trained with"), "no last step yet"


def test_the_critic_is_exported_whole_and_another_run_starts_from_it(tmp_path: Path):
    config = ppo_gae(tmp_path, steps=2)
    roles, _, _ = run(config)
    assert roles.critic is not None
    again = ppo_gae(tmp_path / "again")
    again.critic.path = str(Path(config.run.dir) / "critic")
    fresh = build_roles(again, CPU, None).critic
    assert fresh is not None
    learned, started = (dict(critic.model.named_parameters()) for critic in (roles.critic, fresh))
    assert any("score" in name and bool(weight.any()) for name, weight in learned.items())
    assert (
        largest_difference({k: v.detach() for k, v in learned.items()}, {k: v.detach() for k, v in started.items()})
        == 0
    )


@pytest.mark.parametrize("make", [ppo_gae, reinforce_pp])
def test_micro_batch_size_does_not_change_what_policy_and_critic_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
):
    monkeypatch.setattr(MAKER, make_smooth_optimizer)

    def settings(name: str, tokens: int) -> Config:
        config = make(tmp_path / name, lr=RATE, max_tokens_per_microbatch=tokens, steps=3, updates_per_batch=2)
        config.critic.lr = RATE
        return config

    small, _, _ = run(settings("small", 30))
    large, _, _ = run(settings("large", 10_000))
    start = weights(build_roles(settings("large", 10_000), CPU, None))
    assert apart(weights(small), weights(large), start) < EQUAL


def test_a_poisoned_step_moves_neither_policy_nor_critic(tmp_path: Path):
    replay = FedReplay()
    replay.poisoned = {0, 1}
    with pytest.raises(NonFiniteError, match="2 optimizer steps in a row"):
        run(ppo_gae(tmp_path), replay)


def test_a_checkpoint_while_the_critic_warms_up_changes_nothing_and_resumes_bit_for_bit(tmp_path: Path):
    def warming(folder: Path, **learner: Any) -> Config:
        config = ppo_gae(folder, **({"steps": 5, "save_every": 1} | learner))
        config.critic.warmup_steps = 3
        return config

    unsaved, _, expected = run(warming(tmp_path / "unsaved", save_every=5))
    saved, _, _ = run(warming(tmp_path / "saved"))
    config = warming(tmp_path / "cut")
    with pytest.raises(NoProgress):
        run(config, FedReplay(steps=2))
    again = FedReplay()
    again.next_version = 3
    resumed, _, rows = run(config, again, resume=True)
    assert [row["optim/lr"] > 0 for row in rows.rows] == [False, True, True]
    for other in (saved, resumed):
        assert largest_difference(weights(unsaved), weights(other)) == 0.0
    assert rows.rows[-1]["loss/total"] == expected.rows[-1]["loss/total"]
