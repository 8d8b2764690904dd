"""Settings of the learner, the replay, data and rewards that are refused, and words that are none."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from asyncrl.cli.settings import catalogue
from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.sft.rules import load_sft
from asyncrl.sft.settings import SftConfig
from tests.refusals import REQUIRED, Refused, assert_refused, names

SFT = REQUIRED[:2]


REFUSED: Refused = [
    (["data.curriculum=difficulty"], ["data.curriculum=difficulty", "pass_rate"]),
    (["data.curriculum_window=[0.9,0.1]"], ["data.curriculum_window=[0.9, 0.1]", "two pass rates, from 0 to 1"]),
    (["data.curriculum_window=[0.5]"], ["data.curriculum_window=[0.5]", "[0.1,0.9]"]),
    (["data.curriculum_explore=0"], ["data.curriculum_explore=0", "never drawn again"]),
    (["data.curriculum_passes_at=nan"], ["data.curriculum_passes_at=nan", "the lowest reward that passes"]),
    (["data.curriculum=pass_rate", "data.order_by=level"], ["data.order_by=level", "Leave one of them out"]),
    (["replay.stale_policy=maks"], ["replay.stale_policy must be one of mask, drop, wait", "'maks'", "`mask`"]),
    (
        ["loss=grpo", "loss.kl_coef=0.1", "reference.path=rollout"],
        ["environment.name=single_turn attaches none", "file.py:Name", "./rollout"],
    ),
    (
        ["learner.device=cuda:0", "learner.ranks=2"],
        ["puts all 2 ranks of a machine on one GPU", "learner.device=cuda,"],
    ),
    (["learner.device=cuad"], ["learner.device must be auto, cpu, cuda or cuda:N", "Did you mean `cuda`?"]),
    (["advantage.baseline=median"], ["advantage.baseline must be one of mean, loo, opo, greedy, none", "'median'"]),
    (
        ["advantage.estimator=gea"],
        ["advantage.estimator must be one of group, gdpo, turns, turns_by_number, reinforce_pp", "Did you mean `gae`?"],
    ),
    (["advantage.estimator=gae"], ["takes advantage.baseline=none; got mean", "advantage=gae sets all of them"]),
    (["advantage=gae", "advantage.std=group"], ["takes advantage.std=none or batch; got group", "advantage=gae"]),
    (["advantage=reinforce_pp", "advantage.std=none"], ["takes advantage.std=batch; got none"]),
    (["advantage.lam=0.9"], ["advantage.lam=0.9 does nothing with advantage.estimator=group", "Leave it out"]),
    (["advantage=gae", "advantage.c_bar=2"], ["advantage.c_bar=2.0 does nothing with advantage.estimator=gae"]),
    (
        ["advantage=reinforce_pp_baseline", "advantage.gamma=0.9"],
        ["advantage.gamma=0.9 does nothing", "estimator=reinforce_pp and baseline=mean"],
    ),
    (["advantage=gae", "advantage.gamma=1.5"], ["advantage.gamma must be between 0 and 1", "1.5"]),
    (["advantage=vtrace", "loss=vtrace", "advantage.c_bar=0.5"], ["advantage.c_bar must be at least 1", "0.5"]),
    (["advantage.kl_target=0.1"], ["advantage.kl_target=0.1 adjusts advantage.kl_coef by multiplying it", "0.01"]),
    (
        ["advantage.kl_coef=0.1", "advantage.kl_target=0.1", "advantage.kl_horizon=51", "learner.groups_per_step=32"],
        [
            "advantage.kl_horizon=51 is too short: one step of 256 sequences",
            "would set the coefficient to 0",
            "more than 51.2",
        ],
    ),
    (["advantage.kl_horizon=5"], ["advantage.kl_horizon=5.0 does nothing without advantage.kl_target"]),
    (["advantage.kl_coef=-1"], ["advantage.kl_coef must be at least 0", "-1"]),
    (["loss=vtrace"], ["loss=vtrace needs advantage.estimator=vtrace", "got group and mean", "Add advantage=vtrace"]),
    (["loss=opo"], ["advantage.baseline=opo", "Add advantage=opo"]),
    (["loss=reinforce_pp"], ["advantage.estimator=reinforce_pp", "Add advantage=reinforce_pp"]),
    (["loss=reinforce_pp_baseline"], ["advantage.baseline=mean", "Add advantage=reinforce_pp_baseline"]),
    (["advantage=vtrace"], ["already has the ratio", "loss=dppo_tv would apply it a second time", "Use loss=vtrace"]),
    (["loss=vtrace", "advantage=retrace"], ["loss=vtrace needs advantage.estimator=vtrace", "got retrace and none"]),
    (
        ["loss=remax"],
        [
            "loss=remax needs advantage.estimator=group with advantage.baseline=greedy",
            "advantage.baseline=greedy",
            "Add advantage=remax",
        ],
    ),
    (
        ["advantage.estimator=vtrace_turns", "advantage.baseline=none"],
        ["vtrace_turns already has the ratio", "retrace"],
    ),
    (
        ["advantage=remax", "advantage.std=group", "advantage.kl_coef=0.1"],
        ["advantage.std=group", "each token has a return of its own", "Set advantage.std=none, or loss.kl_coef"],
    ),
    (["advantage.lam_alpha=1"], ["advantage.lam_alpha=1.0 does nothing with advantage.estimator=group"]),
    (["advantage=retrace", "advantage.lam_alpha=-1"], ["advantage.lam_alpha must be at least 0", "-1"]),
    (["advantage.components.a=1"], ["advantage.components={'a': 1.0} does nothing", "Leave it out"]),
    (["advantage=gdpo"], ["gdpo needs the weights", "got advantage.components={}", "advantage.components.correct=1"]),
    (["advantage=gdpo", "advantage.components={a: 0}"], ["not all 0", "{'a': 0.0}"]),
    (["advantage=gdpo", "advantage.components.a=nan"], ["gdpo needs the weights", "finite"]),
    (["advantage=gdpo", "advantage.components.a=much"], ["advantage.components", "much"]),
    (
        ["advantage=gdpo", "advantage.components.a=1", "advantage.kl_coef=1"],
        ["only uses the reward's parts", "Set loss.kl_coef"],
    ),
    (["advantage=gdpo", "advantage.components.a=1", "advantage.baseline=loo"], ["baseline=mean; got loo"]),
    (
        ["advantage=turns", "advantage.baseline=loo"],
        ["advantage.baseline=mean or none; got loo", "advantage=turns sets"],
    ),
    (
        ["advantage=turns_by_number", "advantage.kl_coef=0.1"],
        ["only uses the rewards of the turns", "Set loss.kl_coef instead"],
    ),
    (["advantage=turns", "rollout.group_size=1"], ["rollout.group_size must be at least 2", "always 0"]),
    (["advantage=turns", "advantage.lam=0.5"], ["advantage.lam=0.5 does nothing with advantage.estimator=turns"]),
    (["critic.path=c"], ["critic.path=c does nothing with advantage.estimator=group", "advantage=gae"]),
    (["critic.warmup_steps=3"], ["critic.warmup_steps=3 does nothing", "which has no critic"]),
    (["advantage=gae", "critic.warmup_steps=100"], ["leaves none of learner.steps=100", "Lower it"]),
    (
        ["advantage=gae", "critic.value_clip=0.2"],
        ["critic.value_clip=0.2", "there are none", "learner.updates_per_batch=2 or more"],
    ),
    (["critic.lr=0"], ["critic.lr must be above 0"]),
    (["reference.path=r"], ["reference.path=r does nothing", "Set loss.kl_coef", "advantage.kl_coef"]),
    (["learner.proximal_ema=0.9"], ["which loss.preset=dppo_tv does not use", "loss=decoupled_ppo"]),
    (["learner.proximal_ema=1", "loss=tis"], ["learner.proximal_ema must be at least 0 and below 1", "1.0"]),
    (["advantage.std=groups"], ["advantage.std must be one of none, group, batch", "Did you mean `group`?"]),
    (["learner.reduce_gradients=every"], ["learner.reduce_gradients must be one of auto, last, each"]),
    (["learner.schedule=cosin"], ["learner.schedule must be one of constant, linear, cosine", "`cosine`"]),
    (["run.name='a b'"], ["run.name must be 1 to 64 letters", "'a b'", "Rename"]),
    (["run.name=.."], ["run.name must be 1 to 64 letters", "'..'"]),
    ([f"run.name={'x' * 65}"], ["run.name must be 1 to 64 letters"]),
    (["run.dir=''"], ["run.dir must not be empty", "Leave it out"]),
    (["resume=auto", "overwrite=true"], ["resume=auto and overwrite=true contradict", "Give one of them"]),
    (["resume=atuo"], ["resume must be never, auto or the path of a checkpoint", "'atuo'", "Did you mean `auto`?"]),
    (
        ["learner.ranks=9", "learner.groups_per_step=4", "rollout.min_group_size=2", "learner.updates_per_batch=1"],
        ["learner.groups_per_step * rollout.min_group_size", "= 8 is less than learner.ranks=9"],
    ),
    (["replay.order=lifo"], ["replay.order must be one of fifo, freshest", "'lifo'"]),
    (["replay.max_times_sampled=0"], ["replay.max_times_sampled must be at least 1"]),
    (["replay.group_timeout_s=-1"], ["replay.group_timeout_s must be at least 0"]),
    (
        ["replay.stale_policy=wait", "replay.order=freshest"],
        ["replay.order=freshest", "does not work with replay.order=freshest", "Leave those out"],
    ),
    (["replay.window=-1"], ["replay.window must be at least 0", "-1"]),
    (["replay.admission=prompt"], ["replay.admission", "prompt", "group, sample"]),
    (
        ["replay.admission=sample", "replay.window=9", "rollout.drop_zero_variance=true"],
        ["whole groups are needed for replay.window=9, rollout.drop_zero_variance=true", "replay.admission=group"],
    ),
    (["replay.window=66"], ["replay.window must be at most", "= 65", "that 65 others pass", "Set replay.window=65"]),
    (["replay.window=9", "replay.stale_policy=wait"], ["replay.window=9 trains each group once", "stale_policy=wait"]),
    (
        ["replay.window=9", "replay.max_times_sampled=2"],
        ["and replay.max_times_sampled=2", "Leave the window"],
    ),
    (
        ["replay.max_staleness=0", "replay.pipeline_depth=0", "replay.max_times_sampled=2"],
        ["replay.max_times_sampled=2 does nothing", "Raise replay.max_staleness"],
    ),
    (["replay.durability=disk"], ["replay.durability must be one of journal, memory", "'disk'"]),
    (["replay.journal.retain=some"], ["replay.journal.retain must be one of none, window, all", "'some'"]),
    (["replay.journal.fsync_ms=-1"], ["replay.journal.fsync_ms must be at least 0", "-1"]),
    (["replay.journal.segment_mb=0"], ["replay.journal.segment_mb must be at least 1"]),
    (["replay.journal.window_mb=0"], ["replay.journal.window_mb must be at least 1"]),
    (["replay.max_restarts=-1"], ["replay.max_restarts must be at least 0"]),
    (
        ["replay.durability=memory", "replay.journal.retain=all"],
        ["retain=all does nothing with replay.durability=memory", "or replay.journal.retain=none"],
    ),
    (["replay.max_staleness=-1"], ["replay.max_staleness must be at least 0", "-1"]),
    (["replay.pipeline_depth=5"], ["between 0 and replay.max_staleness=4", "got 5", "replay.pipeline_depth=4"]),
    (["replay.max_staleness=0"], ["between 0 and replay.max_staleness=0", "got 2", "replay.pipeline_depth=0"]),
    (["replay.pipeline_depth=-1"], ["between 0 and replay.max_staleness=4", "got -1"]),
    (["learner.updates_per_batch=5"], ["must be a multiple of learner.updates_per_batch", "32 and 5", "16, 32"]),
    (
        ["learner.ranks=9", "learner.groups_per_step=4", "rollout.group_size=2"],
        ["every rank needs a sequence", "= 8 is less than learner.ranks=9", "Raise"],
    ),
    (
        ["learner.ranks=6", "learner.replicas=4"],
        ["learner.ranks=6 must be a multiple of learner.replicas=4", "learner.replicas to one of 1, 2, 3, 6"],
    ),
    (
        ["learner.ranks=8", "learner.replicas=2", "learner.tensor_parallel=3"],
        [
            "learner.ranks=8 must be a multiple of learner.replicas=2 * learner.tensor_parallel=3",
            "another number of ranks",
        ],
    ),
    (
        ["learner.ranks=6", "learner.sequence_parallel=2", "learner.tensor_parallel=2"],
        [
            "=6 must be a multiple of learner.sequence_parallel=2 * learner.tensor_parallel=2",
            "sequence_parallel to one of 1, 3",
        ],
    ),
    (
        ["learner.ranks=12", "learner.replicas=2", "learner.expert_parallel=4"],
        ["expert_parallel=4 must divide the ranks", "learner.ranks=12, 6 to a copy", "Set it to one of 1, 2, 3, 6"],
    ),
    (
        ["learner.max_tokens_per_microbatch=700"],
        ["must hold the longest sequence", "512 + rollout.max_new_tokens=256 = 768", "got 700", "at least 768"],
    ),
    (["learner.lr=nan"], ["learner.lr must be above 0 and finite", "got nan"]),
    (["learner.weight_decay=nan"], ["learner.weight_decay must be at least 0", "got nan"]),
    (["replay.heartbeat_timeout_s=nan"], ["replay.heartbeat_timeout_s must be at least 3", "got nan"]),
    (["replay.address=tcp://127.0.0.1:99999"], ["no port between 1 and 65535", "tcp://127.0.0.1:5577"]),
    (["replay.address=tcp://127.0.0.1:0"], ["no port between 1 and 65535"]),
    (["learner.lr=-1"], ["learner.lr must be above 0", "got -1"]),
    (["learner.clip_norm=0"], ["learner.clip_norm must be above 0"]),
    (["reward.timeout_s=0"], ["reward.timeout_s must be above 0"]),
    (
        ["reward.function=asyncrl.rewards.reward_model:RewardModel"],
        ["reward=model needs a model", "Set reward.model=PATH"],
    ),
    (["reward.host=wokrer"], ["reward.host must be one of worker, ray", "Did you mean `worker`?"]),
    (
        ["reward.host=ray", "rollout.host=process"],
        ["needs Ray, which rollout.host=process does not start", "reward.host=worker"],
    ),
    (
        ["reward.gpus=1"],
        ["reward.gpus=1.0 is only for a reward service on Ray", "Set reward.host=ray, or reward.gpus=0"],
    ),
    (["reward.gpus=-1"], ["reward.gpus must be at least 0"]),
    (["replay.wait_timeout_s=0"], ["replay.wait_timeout_s must be above 0"]),
    (["replay.wait_timeout_s=7200"], ["at most 3,600", "got 7200", "Set replay.wait_timeout_s=3600"]),
    (["learner.beta2=1"], ["learner.beta2 must be above 0 and below 1", "got 1"]),
    (
        ["replay.max_bytes=1000"],
        ["replay.max_bytes=1000 is too small", "= 10223616", "Set replay.max_bytes=10223616"],
    ),
    (["learner.groups_per_step=0"], ["learner.groups_per_step must be at least 1", "got 0"]),
    (["learner.save_every=0"], ["learner.save_every must be at least 1", "got 0"]),
    (["learner.ranks=0"], ["learner.ranks must be at least 1"]),
    (["learner.updates_per_batch=0"], ["learner.updates_per_batch must be at least 1"]),
    (["eval.chunk=0"], ["eval.chunk must be at least 1"]),
    (["replay.heartbeat_timeout_s=2"], ["at least 3 * replay.heartbeat_s=1.0", "got 2.0", "heartbeat_timeout_s=3"]),
    (["eval.every=10", "eval.path=''"], ["eval.every=10 needs eval.path", "eval.every=0"]),
    (["eval.name=a/b"], ["eval.name", "'a/b'"]),
    (["replay.address=tcp://10.0.0.5:1", "weights.host=10.0.0.6"], ["replay.keys is required", "asyncrl keys DIR"]),
    (["replay.address=tcp://*:5577", "replay.keys=k"], ["would listen on every network", "tcp://10.0.0.5:5577"]),
    (["replay.address=tcp://0.0.0.0:5577", "replay.keys=k"], ["would listen on every network"]),
    (["replay.address=tcp://0:5577", "replay.keys=k"], ["would listen on every network"]),
    (["replay.address='tcp://[0:0:0:0:0:0:0:0]:5577'", "replay.keys=k"], ["would listen on every network"]),
    (["replay.address=tcp://127.no-such-name.invalid:5577"], ["can be reached from other machines", "asyncrl keys"]),
    (["replay.address=10.0.0.5:5577"], ["must be tcp://HOST:PORT or ipc://PATH", "'10.0.0.5:5577'", "Example"]),
    (["replay.address=tcp://10.0.0.5:5577", "replay.keys=k"], ["weights.host=127.0.0.1", "Set weights.host"]),
    (["loss.clip_low=-1", "loss=ppo"], ["loss.clip_low", "-1"]),
    (["loss.tau_pos=1"], ["does not use loss.tau_pos=1", "remove it"]),
    (["eval.min_p=1", "eval.temperature=1"], ["eval.min_p must be at least 0", "below 1 (0 turns it off); got 1"]),
    (["eval.top_p=0.9"], ["eval.top_p=0.9 does nothing at eval.temperature=0", "Set eval.temperature=1"]),
    (
        ["eval.sets.a.path=e.jsonl", "eval.sets.a.top_k=5"],
        ["eval.sets.a: eval.top_k=5 does nothing at eval.temperature=0"],
    ),
    (["top_p=0.9"], ["no setting `top_p`", "Did you mean `rollout.top_p`?"]),
    (["telemetry.wandb_key=x"], ["keys never go into settings", "WANDB_API_KEY"]),
    (["max_staleness=1"], ["no setting `max_staleness`", "Did you mean `replay.max_staleness`?"]),
    (["algorithm.adv_estimator=gae"], ["Did you mean `advantage.estimator`?"]),
    (["learner.learning_rate=1"], ["no setting `learner.learning_rate`", "Did you mean `learner.lr`?"]),
    (["replay.max_stalenes=1"], ["Did you mean `replay.max_staleness`?"]),
    (["trainer.total_steps=1"], ["no setting `trainer.total_steps`", "Did you mean `learner.steps`?"]),
    (["zzz.yyy=1"], ["no setting `zzz.yyy`", "Known here: advantage, critic, data"]),
    (["replay.zzzzzz=1"], ["no setting `replay.zzzzzz`", "Known here: replay.address"]),
    (["+learner.lr=1"], ["not added or removed", "Write `learner.lr=...`"]),
    (["los=ppo"], ["no setting `los`", "Did you mean `loss=NAME`"]),
    (["~loss"], ["`~loss`: settings can be changed, but not added or removed"]),
    (["run.dir=~/runs"], ["could not be read", "`~` is not expanded", "$HOME"]),
    (["data.path=a=b.jsonl"], ["could not be read", "'data.path=\"a=b.jsonl\"'"]),
    (["run.name=ü"], ["could not be read", "beyond ASCII", "'run.name=\"ü\"'"]),
    (["learner.lr"], ["`learner.lr` is not of the form key=value"]),
    (["learner.lr = 3"], ["a space before the `=`", "Write `learner.lr=3`"]),
    (["learner.lr", "=", "3"], ["`learner.lr` is not of the form key=value: write `learner.lr=VALUE`, without spaces"]),
    (["lr=1e-4"], ["no setting `lr`", "Did you mean `learner.lr`"]),
    (["warmup_steps=1"], ["no setting `warmup_steps`", "Did you mean `learner.warmup_steps`"]),
    (["learner.steps=3", "learner.steps=abc"], ["`learner.steps=abc` is refused"]),
    (["learner.steps=1e3"], ["`learner.steps=1e3` is refused", "without exponent and point: learner.steps=1000"]),
    (["rollout.group_size=8.0"], ["`rollout.group_size=8.0` is refused", "rollout.group_size=8"]),
    (["learner.steps=2.5"], ["`learner.steps=2.5` is refused", "It is a whole number"]),
    (["learner.lr=yes"], ["`learner.lr=yes` is refused", "yes, no, on and off mean true and false"]),
    (["resume=yes"], ["resume must be never, auto", "'yes'", "yes, no, on and off mean true and false"]),
    (["rollout.drop_truncated=False"], ["must be one of never, any, all", "yes, no, on and off mean true and false"]),
    (["learner.steps=abc", "learner.steps=3"], ["`learner.steps=abc` is refused"]),
    (["loss=dppo_tw"], ["`loss=dppo_tw`: there is no such choice", "Did you mean `dppo_tv`?", "Choices:"]),
    (["experiment=quikstart"], ["there is no such choice", "Did you mean `quickstart`?"]),
    (["learner=3"], ["`learner` takes the name of a file in configs/learner/"]),
    (["data=rows.jsonl", "reward=r.py:score"], ["write `data.path=rows.jsonl`", "write `reward.function=r.py:score`"]),
    (["learner.steps=abc"], ["`learner.steps=abc` is refused", "Integer", "`asyncrl settings learner.steps` says"]),
    (["reward.function=[a.py:f,b.py:g]"], ["is refused", "Several are `reward.functions.NAME=FILE.py:FUNCTION`"]),
    (["reward.reward_weights=[1,2]"], ["Did you mean `reward.functions`?"]),
    (["learner.steps=1.5"], ["`learner.steps=1.5` is refused", "Integer"]),
    (["overwrite=maybe"], ["`overwrite=maybe` is refused", "bool"]),
    (["run.name=a,b"], ["could not be read as `key=value`", "quotes"]),
    (["data.path=x(1).jsonl"], ["could not be read as `key=value`", "quotes"]),
    (["loss=null"], ["`loss` takes the name of a file in configs/loss/, got 'null'"]),
    (["data.path=[a"], ["could not be read as `key=value`", "quotes"]),
    (["learner.lr=choice(1,2)"], ["could not be read as `key=value`", "'learner.lr=\"choice(1,2)\"'"]),
    (["engine.urls=[http://[::1]:1,http://a:2]"], ["""'engine.urls=["http://[::1]:1","http://a:2"]'"""]),
    (["engine.urls=http://a:1"], ["is refused", """It is a list: 'engine.urls=["http://a:1"]'"""]),
    (
        ["learner.offload=optimizer", "learner.optimizer=adamw_8bit"],
        ["only moves float32 moments", "learner.optimizer=adamw_8bit", "learner.offload=all works with both"],
    ),
    (["learner.profile=4:2"], ["learner.profile must be FIRST:LAST", "got 4:2", "Example: 10:13"]),
    (["learner.profile=10:13", "learner.steps=9"], ["learner.profile=10:13 does nothing: learner.steps=9 is before"]),
    (["learner.copy_to=memory://x"], ["learner.copy_to=memory://x", "lost when it ends", "file:///backup"]),
    (["learner.beta1=nan"], ["learner.beta1 must be at least 0 and below 1; got nan", "The default is 0.9"]),
    (["learner.min_lr_ratio=-1"], ["learner.min_lr_ratio must be between 0 and 1; got -1.0"]),
    (["eval.temperature=1e30"], ["eval.temperature must be 0.01 to 100; got 1e+30", "eval.temperature=0 is greedy"]),
    (["replay.heartbeat_s=1e-30"], ["replay.heartbeat_s must be at least 0.001, a millisecond", "got 1e-30"]),
    (["loss.entropy_coef=inf"], ["loss.entropy_coef must be at least 0, and finite; got inf"]),
    (["loss.opsm_delta=nan"], ["loss.opsm_delta must be a number; got nan"]),
    (["learner.steps=" + "9" * 5000], ["`learner.steps=99999999999999999999...`", "5000 digits", "a shorter one"]),
    (["run.dir=${run.nam}"], ["`run.dir=${run.nam}` is refused", "run.nam"]),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=names(REFUSED))
def test_a_refused_setting_says_the_rule_the_value_and_the_way_out(overrides: list[str], parts: list[str]) -> None:
    assert_refused(overrides, parts)


@pytest.mark.parametrize(("load", "kind", "required"), [(load_config, Config, REQUIRED), (load_sft, SftConfig, SFT)])
def test_no_count_and_no_time_is_without_end(
    load: Callable[[list[str]], object], kind: type, required: list[str]
) -> None:
    counted = {setting.key: setting.kind for setting in catalogue(kind) if setting.kind in ("int", "float")}
    huge = {
        key: 10**20 if number == "int" else 1e30
        for key, number in counted.items()
        if number == "int"
        or key.endswith(("_s", "_ms", "epochs", "gpus", "gpus_per_worker", ".lr", "adam_eps", "decay"))
    }
    with pytest.raises(ConfigError) as refused:
        load([*required, *(f"{key}={value}" for key, value in huge.items())])
    for key in huge:
        assert re.search(rf"\b{key} must be at most [\d,]+; got 1.* Set {key}=\d+ or less", str(refused.value)), key


def test_a_device_that_does_not_exist_is_not_also_one_for_all_ranks() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(["learner.device=cuda:x", "learner.ranks=2", *REQUIRED])
    assert "must be auto, cpu, cuda or cuda:N" in str(refused.value) and "puts all" not in str(refused.value)


def test_everything_that_is_wrong_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([*REQUIRED, "replay.pipeline_depth=7", "rollout.temperature=0", "learner.schedule=cos"])
    message = str(refused.value)
    assert message.startswith("3 settings are refused:")
    assert all(key in message for key in ("replay.pipeline_depth", "rollout.temperature", "learner.schedule"))


def test_all_unknown_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="2 settings are refused"):
        load_config([*REQUIRED, "rollout.repetition_penalty=1", "learner.learning_rate=1"])


def test_missing_required_settings_are_named_together() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([])
    assert "model.path=... " in str(refused.value)
    assert "reward.function=..." in str(refused.value)
