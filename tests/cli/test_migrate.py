"""Tests of `asyncrl migrate`: its output is a settings file that loads, and no given setting is ignored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.checks.rewards import reward_terms
from asyncrl.cli.arguments.settings_file import with_files
from asyncrl.cli.main import main
from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.settings.loss.meaning import resolve

GSM8K = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=~/data/gsm8k/train.parquet
data.val_files=['gsm8k/test.parquet'] data.train_batch_size=1024 data.max_prompt_length=512
data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.path=Qwen/Qwen3-8B
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=['console','wandb']
trainer.project_name=verl_grpo trainer.experiment_name='qwen3 8b' trainer.n_gpus_per_node=8 trainer.nnodes=1
trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 trainer.total_training_steps=105 made.up=3
custom_reward_function.path=my/gsm8k.py +custom_reward_function.reward_kwargs.format_score=0.1
+custom_reward_function.reward_kwargs.method=strict +custom_reward_function.reward_kwargs.weights.length=0.5
+custom_reward_function.reward_kwargs.answer=${data.key} +actor_rollout_ref.actor.optim.betas=[0.9,0.95]
actor_rollout_ref.actor.optim.min_lr_ratio=0.1
"""
PPO = """
data.train_files=[a.parquet,b.parquet] data.max_prompt_length=1024 data.max_response_length=512 data.train_batch_size=64
data.truncation=left data.prompt_key=question actor_rollout_ref.model.path=m
actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm actor_rollout_ref.actor.entropy_coeff=0.001
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.clip_ratio_low=0.1 actor_rollout_ref.actor.clip_ratio_high=0.3
actor_rollout_ref.actor.optim.warmup_style=cosine actor_rollout_ref.actor.optim.min_lr_ratio=0.2
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=200
algorithm.adv_estimator=gae algorithm.lam=0.98 critic.optim.lr=2e-5 critic.model.path=c critic.cliprange_value=0.4
algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_ctrl.type=adaptive
reward_model.enable=True reward_model.model.path=rm trainer.critic_warmup=3
"""


def migrated(
    framework: str, arguments: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], *needed: str
) -> tuple[Config, str]:
    """The settings that what it prints makes, and the text."""
    assert main(["migrate", framework, *arguments]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "migrated.yaml"
    file.write_text(text)
    return load_config([*with_files([str(file)]), *needed]), text


def test_a_grpo_command_of_verl_becomes_settings_that_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, text = migrated("verl", GSM8K.split("\n", 1)[1].replace("'qwen3 8b'", "qwen3/8b").split(), tmp_path, capsys)
    assert config.data.path == str(Path("~/data/gsm8k/train.parquet").expanduser())
    assert (config.eval.path, config.eval.every) == ("gsm8k/test.parquet", 5)
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.data.overlong) == (512, 1024, "drop")
    assert (config.learner.groups_per_step, config.learner.updates_per_batch, config.rollout.group_size) == (1024, 4, 5)
    assert (config.learner.lr, config.learner.beta2, config.learner.weight_decay) == (1e-6, 0.95, 0.01)
    assert config.learner.max_tokens_per_microbatch == 32 * 1536 and config.learner.steps == 105
    loss = resolve(config.loss)
    assert (loss.preset, loss.clip_low, loss.dual_clip) == ("dual_clip", 0.2, 3.0)
    assert (loss.aggregation, loss.kl_coef, loss.kl) == ("token_mean", 0.001, "k3")
    assert (config.advantage.estimator, config.advantage.std) == ("group", "group")
    assert (config.engine.name, config.engine.tensor_parallel) == ("vllm", 2)
    assert config.engine.vllm == {"gpu_memory_utilization": 0.6}
    assert (config.reward.function, config.run.name) == ("my/gsm8k.py:compute_score", "qwen3-8b")
    assert config.reward.args == {"format_score": 0.1, "method": "strict", "weights": {"length": 0.5}}
    assert config.telemetry.wandb and config.model.activation_checkpointing and config.learner.save_every == 20
    assert "learner.lr: 1.0e-06  # from actor_rollout_ref.actor.optim.lr\n" in text
    assert "data.prompt_column: prompt  # from data.prompt_key (verl's default)\n" in text
    for left, why in (
        ("trainer.total_epochs=15", "total_training_steps"),
        ("trainer.n_gpus_per_node=8", "learner.ranks"),
        ("made.up=3", "not known here"),
        ("custom_reward_function.reward_kwargs.answer=${data.key}", "refers to another setting"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=False", "FSDP2"),
    ):
        assert any(f"# no equivalent: {left}: " in line and why in line for line in text.splitlines()), left
    given = {word.partition("=")[0].lstrip("+") for word in GSM8K.split() if "=" in word}
    passed_over = {key for key in given if key not in text}
    # Off, and what hangs on them with them.
    assert passed_over <= {
        "algorithm.use_kl_in_reward",
        "actor_rollout_ref.actor.optim.min_lr_ratio",
        "actor_rollout_ref.actor.entropy_coeff",
        "actor_rollout_ref.actor.use_kl_loss",
        "data.truncation",
        "actor_rollout_ref.rollout.top_p",
    }


def test_a_ppo_command_of_verl_with_a_reward_model_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = migrated("verl", PPO.split(), tmp_path, capsys)
    assert (config.data.path, config.data.prompt_column) == (["a.parquet", "b.parquet"], "question")
    assert (config.data.overlong, config.rollout.group_size) == ("truncate_left", 1)
    assert (config.loss.aggregation, config.loss.constant_length) == ("constant", 512.0)
    assert (config.loss.clip_low, config.loss.clip_high) == (0.1, 0.3)
    assert (config.learner.max_tokens_per_microbatch, config.learner.warmup_steps) == (24000, 20)
    assert (config.learner.schedule, config.learner.min_lr_ratio) == ("cosine", 0.2)
    assert (config.advantage.estimator, config.advantage.lam, config.advantage.gamma) == ("gae", 0.98, 1.0)
    assert (config.advantage.kl_coef, config.advantage.kl_target) == (0.01, 0.1)
    assert (config.critic.path, config.critic.lr, config.critic.value_clip, config.critic.warmup_steps) == (
        "c",
        2e-5,
        0.4,
        3,
    )
    assert (config.reward.model, config.reward.function) == ("rm", "asyncrl.rewards.reward_model:RewardModel")
    assert config.loss.entropy_coef == 0.001


def test_several_reward_functions_of_trl_keep_their_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "args.yaml"
    theirs.write_text(
        "reward_funcs: [mine.py:short, pack.rewards.right, other.py:short]\nreward_weights: [1, 0.5, 2]\n"
    )
    config, _ = migrated("trl", [str(theirs)], tmp_path, capsys, "model.path=m", "data.path=d.jsonl")
    terms = [(term.name, term.function, term.weight) for term in reward_terms(config.reward)]
    assert terms == [
        ("short_0", "mine.py:short", 1.0), ("right", "pack.rewards:right", 0.5), ("short_2", "other.py:short", 2.0),
    ]  # fmt: skip
    theirs.write_text("reward_funcs: [accuracy_reward]\nreward_weights: [1]\n")
    _, text = migrated("trl", [str(theirs)], tmp_path, capsys, "model.path=m", "data.path=d.jsonl", "reward=math")
    assert "no equivalent: reward_funcs" in text
    assert "here a prompt longer than data.max_prompt_tokens is an error" in text


def test_prompts_of_agents_are_dropped_and_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, needed = tmp_path / "args.yaml", ("reward.function=r.py:f", "model.path=m", "data.path=d.jsonl")
    theirs.write_text("max_prompt_length: 512\ntools: [search]\n")
    config, text = migrated("trl", [str(theirs)], tmp_path, capsys, *needed)
    assert config.data.overlong == "drop" and "reads the complete messages of a row" in text


def test_a_yaml_of_trl_becomes_settings_that_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "args.yaml"
    theirs.write_text(
        "model_name_or_path: Qwen/Qwen2-0.5B-Instruct\ndataset_name: trl-lib/DeepMath-103K\n"
        "dataset_train_split: train\n"
        "learning_rate: 1e-5\nnum_generations: 16\nmax_prompt_length: 1024\nmax_completion_length: 2048\n"
        "per_device_train_batch_size: 8\ngradient_accumulation_steps: 4\nsteps_per_generation: 8\nbeta: 0.04\n"
        "epsilon_high: 0.28\nloss_type: dr_grpo\nscale_rewards: false\nrepetition_penalty: 1.1\n"
        "max_steps: 100\nsave_steps: 25\n"
        "warmup_ratio: 0.1\nlr_scheduler_type: cosine\nbf16: true\nuse_vllm: true\nvllm_mode: colocate\n"
        "vllm_gpu_memory_utilization: 0.5\nreport_to: [wandb]\noutput_dir: out\nlogging_steps: 1\nnum_iterations: 2\n"
        "use_peft: true\nlora_r: 32\nlora_alpha: 64\nlora_target_modules: [q_proj, v_proj]\nsurprise: 1\n"
    )
    needed = ("reward.function=r.py:f",)
    config, text = migrated("trl", [str(theirs), "num_processes=4"], tmp_path, capsys, *needed)
    assert (config.model.path, config.data.path) == ("Qwen/Qwen2-0.5B-Instruct", "hf:trl-lib/DeepMath-103K:train")
    assert (config.learner.groups_per_step, config.learner.updates_per_batch) == (8 * 4 * 8 // 16, 2)
    assert (config.learner.epochs_per_batch, config.learner.optimizer_steps) == (2, 4)
    assert (config.rollout.group_size, config.rollout.max_new_tokens, config.data.overlong) == (
        16,
        2048,
        "truncate_left",
    )
    assert "# data.overlong=truncate_left is for environment=single_turn, which reads tokens." in text
    assert (config.loss.preset, config.loss.clip_high, config.loss.kl_coef) == ("dr_grpo", 0.28, 0.04)
    assert (config.loss.constant_length, config.advantage.std) == (2048, "none")
    assert (config.learner.lr, config.learner.schedule, config.learner.warmup_steps) == (1e-5, "cosine", 10)
    assert (config.model.dtype, config.model.lora_rank, config.model.lora_targets) == (
        "bfloat16",
        32,
        ["q_proj", "v_proj"],
    )
    assert config.engine.name == "vllm" and config.engine.vllm == {"gpu_memory_utilization": 0.5}
    assert "# still needed: reward.function\n" in text
    for left in ("repetition_penalty=1.1", "vllm_mode=colocate", "logging_steps=1", "surprise=1"):
        assert f"# no equivalent: {left}: " in text


@pytest.mark.parametrize(
    ("framework", "given"),
    [
        ("verl", [f"actor_rollout_ref.rollout.{each}" for each in ("name=vllm", "n=8", "top_p=0.9", "top_k=50")]),
        ("trl", ["use_vllm=true", "num_generations=8", "top_p=0.9", "top_k=50", "min_p=0.0"]),
    ],
)
def test_truncated_sampling_takes_the_engine_that_records_it(
    framework: str, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ("model.path=m", "data.path=d", "reward.function=r.py:f")
    config, text = migrated(framework, given, tmp_path, capsys, *needed)
    assert (config.rollout.top_p, config.rollout.top_k, config.rollout.min_p) == (0.9, 50, 0.0)
    assert config.engine.name == "transformers" and "for engine=vllm leave them out" in text


def test_dppo_of_verl_has_no_pull_towards_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ("model.path=m", "data.path=d", "reward.function=r.py:f")
    given = ["actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv", "actor_rollout_ref.rollout.n=8"]
    config, _ = migrated("verl", given, tmp_path, capsys, *needed)
    assert (config.loss.preset, config.loss.behavior_kl) == ("dppo_tv", 0.0)


ACTOR = "actor_rollout_ref.actor."


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("clip_ratio_high=0.28", {"preset": "dual_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}),
        ("clip_ratio=0.1", {"clip_low": 0.2, "clip_high": 0.2}),  # there as well
        ("clip_ratio=0.1 clip_ratio_low=null", {"clip_low": 0.1, "clip_high": 0.2}),
        ("policy_loss.loss_mode=cispo clip_ratio_high=0.28", {"ratio_floor": 0.8, "ratio_cap": 1.28}),
        (
            "policy_loss.loss_mode=dppo_kl clip_ratio_low=0.05 clip_ratio_c=20",
            {"divergence_low": 0.05, "divergence_high": 0.2, "ratio_cap": 20.0},
        ),
        ("policy_loss.loss_mode=dppo_tv", {"divergence_low": 0.2, "ratio_cap": 3.0}),
        # Not by tokens, which is the default of its `loss_agg_mode`.
        ("policy_loss.loss_mode=gspo", {"clip_low": 0.2, "aggregation": "seq_mean_token_mean"}),
        ("policy_loss.loss_mode=sapo tau_neg=1.2", {"tau_neg": 1.2, "aggregation": "seq_mean_token_mean"}),
        ("loss_agg_mode=seq-mean-token-sum-norm loss_scale_factor=2048", {"constant_length": 2048.0}),
    ],
)
def test_a_loss_of_verl_is_bounded_and_aggregated_as_it_is_there(
    given: str, ours: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/losses.md has the same pairs, compared number by number."""
    needed = ("model.path=m", "data.path=d", "reward.function=r.py:f", "rollout.group_size=8")
    config, _ = migrated("verl", [ACTOR + word for word in given.split()], tmp_path, capsys, *needed)
    loss = resolve(config.loss)
    assert {name: getattr(loss, name) for name in ours} == ours


def test_what_changes_a_run_of_verl_and_has_no_equivalent_is_named_with_a_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ("model.path=m", "data.path=d", "rollout.group_size=8")
    given = {
        "algorithm.rollout_correction.rollout_is=token": "loss=tis",
        "reward.reward_manager.name=dapo": "reward=dapo",
        "reward.reward_kwargs.overlong_buffer_cfg.len=512": "overlong",
        "actor_rollout_ref.rollout.repetition_penalty=1.1": "not the policy",
        "actor_rollout_ref.rollout.mode=async": "always asynchronous",
        "async_training.staleness_threshold=0.5": "replay.max_staleness",
        "trainer.v1.sampler.max_off_policy_threshold=8": "replay.max_staleness",
        "data.train_max_samples=100": "data.where",
        "actor_rollout_ref.model.target_modules=.*_proj": "model.lora_targets",
    }
    more = ["reward.custom_reward_function.path=mine.py", "reward.custom_reward_function.reward_kwargs.bonus=0.5"]
    more += ["actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs=2", "actor_rollout_ref.model.lora_rank=8"]
    config, text = migrated("verl", [*given, *more], tmp_path, capsys, *needed)
    assert (config.reward.function, config.reward.args) == ("mine.py:compute_score", {"bonus": 0.5})
    assert config.engine.vllm == {"max_logprobs": 2}
    for key, why in given.items():
        assert any(line.startswith(f"# no equivalent: {key}: ") and why in line for line in text.splitlines()), key
    config, _ = migrated("verl", ["reward.reward_model.enable=true", "reward.reward_model.model_path=rm"],
                         tmp_path, capsys, *needed)  # fmt: skip
    assert config.reward.model == "rm"


def test_what_newer_versions_of_trl_say_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ("model.path=m", "data.path=d", "reward.function=r.py:f")
    theirs = tmp_path / "args.yaml"
    theirs.write_text(
        "warmup_steps: 0.03\nmax_steps: 200\nlr_scheduler_type: cosine_with_min_lr\noptim: adamw_8bit\nbeta: 0.01\n"
        "lr_scheduler_kwargs: {min_lr_rate: 0.1}\nuse_bias_correction_kl: true\ncast_lm_head_to_fp32: true\n"
        "gradient_checkpointing_kwargs: {use_reentrant: false}\ndtype: bfloat16\n"
    )
    config, text = migrated("trl", [str(theirs)], tmp_path, capsys, *needed)
    assert (config.learner.warmup_steps, config.learner.schedule, config.learner.min_lr_ratio) == (6, "cosine", 0.1)
    assert (config.learner.optimizer, config.model.fp32_head, resolve(config.loss).kl) == (
        "adamw_8bit",
        True,
        "ratio_k3",
    )
    assert "gradient_checkpointing_kwargs.use_reentrant=False: model.activation_checkpointing\n" in text
    assert "dtype=bfloat16: model.dtype is that of the computation" in text
    _, text = migrated("trl", ["warmup_steps=0.03"], tmp_path, capsys, *needed)
    assert "# no equivalent: warmup_steps=0.03: give steps: learner.warmup_steps" in text


def test_the_cap_of_cispo_is_what_trl_calls_epsilon_high(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ("model.path=m", "data.path=d", "reward.function=r.py:f")
    config, _ = migrated("trl", ["loss_type=cispo", "epsilon_high=5.0"], tmp_path, capsys, *needed)
    assert resolve(config.loss).ratio_cap == 5.0


def test_how_an_evaluation_of_verl_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ("model.path=m", "data.path=d", "reward.function=r.py:f")
    asked = [f"actor_rollout_ref.rollout.val_kwargs.{each}" for each in ("n=4", "temperature=0.6", "top_p=0.95")]
    given = ["actor_rollout_ref.rollout.n=8", "data.val_files=held.parquet", *asked]
    config, text = migrated("verl", given, tmp_path, capsys, *needed)
    assert (config.eval.samples, config.eval.temperature, config.eval.top_p) == (1, 0.0, 1.0)
    assert "val_kwargs.n=4: only translated with eval.path and do_sample" in text
    given.append("actor_rollout_ref.rollout.val_kwargs.do_sample=True")
    config, _ = migrated("verl", given, tmp_path, capsys, *needed)
    assert (config.eval.samples, config.eval.temperature, config.eval.top_p) == (4, 0.6, 0.95)
    assert config.engine.name == "vllm" and config.rollout.top_p == 1.0


@pytest.mark.parametrize("framework", ["verl", "trl"])
def test_a_framework_s_defaults_alone_load(framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With nothing but a seed: what differs from our defaults stands in what is printed."""
    needed = ("model.path=m", "data.path=d", "reward.function=r.py:f", "rollout.group_size=8")
    config, _ = migrated(framework, ["data.seed=3" if framework == "verl" else "seed=3"], tmp_path, capsys, *needed)
    assert config.seed == 3
    # As long as theirs, with their optimizer.
    assert config.learner.epochs == {"verl": 30, "trl": 3}[framework]
    assert (config.learner.beta1, config.learner.beta2, config.model.activation_checkpointing) == (0.9, 0.999, True)


@pytest.mark.parametrize(
    ("kind", "loss"), [("grpo", "grpo"), ("dapo", "dapo"), ("bnpo", "dapo"), ("cispo", "cispo"), ("sapo", "sapo")]
)
def test_each_loss_of_trl_is_one_of_ours(
    kind: str, loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ("model.path=m", "data.path=d", "reward.function=r.py:f")
    config, _ = migrated("trl", ["--loss_type", kind, "--bf16"], tmp_path, capsys, *needed)
    assert (config.loss.preset, config.model.dtype) == (loss, "bfloat16")


def test_arguments_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.yaml").write_text("- 1\n")
    files = {name: [str(tmp_path / f"{name}.yaml")] for name in ("list", "binary")}
    for arguments, says in (
        ([], "no settings"),
        (files["list"], "has no settings"),
        (files["binary"], "binary.yaml cannot be read"),
    ):
        assert main(["migrate", "verl", *arguments]) == 2
        assert says in capsys.readouterr().err
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("framework", "given"),
    [
        *(("verl", f"data.train_batch_size={value}") for value in ("null", "0", "1e400", "[1]", "many", "2.5")),
        ("verl", "actor_rollout_ref.actor.ppo_mini_batch_size=0"),
        ("verl", "data.max_prompt_length=[1]"),
        ("trl", "num_generations=0"),
        ("trl", "gradient_accumulation_steps=null"),
        ("trl", "num_train_epochs=x"),
        ("trl", "num_processes=x"),
    ],
)
def test_what_is_no_number_where_theirs_is_one_is_refused_by_its_key(
    framework: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", framework, given]) == 2
    key = given.partition("=")[0].replace(".", r"\.")
    assert re.search(rf"ConfigError: {key}=.*: \w+ expects a .*number", capsys.readouterr().err)


def test_a_launch_script_is_not_read_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "verl", "run_grpo.sh"]) == 2
    assert "run_grpo.sh is a shell script, which cannot be read: copy its arguments" in capsys.readouterr().err
