"""Settings of engines, workers, weights and models that are refused."""

from __future__ import annotations

import pytest

from asyncrl.checks.rules.engine import versions_and_logprobs_stay_true
from asyncrl.config import config_from_dict, config_to_dict, load_config
from asyncrl.schema import Config
from tests.refusals import REQUIRED, Refused, assert_refused, names

URL = "http://127.0.0.1:8000"
SERVER = ["engine=server", f"engine.urls=[{URL}]", "rollout.workers=1"]


REFUSED: Refused = [
    (["model.dtype=bf16"], ["model.dtype must be one of auto, float32, bfloat16", "'bf16'", "`bfloat16`"]),
    (
        ["environment=search", "data.overlong=truncate_left"],
        ["data.overlong=truncate_left shortens the tokens", "first request from the whole row", "drop"],
    ),
    (["environment.name=singel_turn"], ["environment.name must be one of", "Did you mean `single_turn`?"]),
    (["environment.name=own.py"], ["yours as file.py:Name or package.module:Name; got 'own.py'"]),
    (
        ["engine.name=transformer"],
        ["engine.name must be one of vllm, transformers, server, sglang, fake", "`transformers`?"],
    ),
    (["engine=server"], ["needs the addresses", "engine.urls=[http://127.0.0.1:8000]"]),
    (["engine.urls=[http://127.0.0.1:8000]"], ["engine.urls does nothing with engine=transformers", "engine=server"]),
    (
        [*SERVER, "engine.urls=[http://8.8.8.8:8000]"],
        ["http://8.8.8.8:8000 is neither", "no key protects", "127.0.0.1"],
    ),
    ([*SERVER, "engine.urls=[127.0.0.1:8000]"], ["'127.0.0.1:8000' is not of the form http://HOST:PORT"]),
    ([*SERVER, "engine.urls=[http://127.0.0.1]"], ["'http://127.0.0.1' is not of the form http://HOST:PORT"]),
    (
        [*SERVER, "engine.urls=[http://127.0.0.1:8000/v1]"],
        ["is not of the form http://HOST:PORT", "nothing after the port"],
    ),
    ([*SERVER, "engine.urls=[http://a..b:8000]"], ["'a..b' cannot be resolved here"]),
    ([*SERVER, f"engine.urls=[{URL},{URL}]"], ["names a server twice", "each once"]),
    ([*SERVER, "engine.urls=[http://127.0.0.2:8000,http://127.0.0.2:8000/]"], ["names a server twice"]),
    ([*SERVER, "engine.urls=['http://:secret@127.0.0.1:8000']"], ["contains a name or password", "engine.key_env"]),
    ([*SERVER, "engine.urls=['http://[::1']"], ["'http://[::1' is not of the form http://HOST:PORT"]),
    (
        [*SERVER, "rollout.workers=2"],
        ["rollout.workers=2 is more than the number of servers, 1 in engine.urls", "Set rollout.workers=1"],
    ),
    ([*SERVER, "engine.key_env=NO_SUCH_KEY_HERE"], ["engine.key_env=NO_SUCH_KEY_HERE", "not set. Export it"]),
    ([*SERVER, "weights=files"], ["weights.transport=files is not supported with engine=server", "weights=broadcast"]),
    ([*SERVER, "model=lora"], ["model.lora_rank=16 is not supported with engine=server", "engine=vllm"]),
    ([*SERVER, "engine.record_topk=4"], ["engine.record_topk=4 needs engine=transformers or engine=vllm"]),
    (
        [*SERVER, "learner.router_replay=true"],
        ["router_replay=true needs engine=transformers", "engine=server does not"],
    ),
    (["engine=vllm", "learner.router_replay=true"], ["router_replay=true needs engine=transformers", "Set"]),
    ([*SERVER, "rollout.top_k=4"], ["a vLLM server does not say what a token was drawn from"]),
    (["engine=sglang"], ["engine=sglang needs the addresses", "engine.urls=[http://127.0.0.1:8000]"]),
    (
        [*SERVER, "engine=sglang", "rollout.temperature=0.7"],
        ["SGLANG_RETURN_ORIGINAL_LOGPROB", "rollout.temperature=1"],
    ),
    (
        [*SERVER, "engine=sglang", "model=lora"],
        ["model.lora_rank=16 is not supported with engine=sglang", "engine=vllm"],
    ),
    ([*SERVER, "engine=sglang", "rollout.top_k=4"], ["before anything was left out"]),
    (["weights.on_update=recomputed"], ["weights.on_update must be one of keep, recompute", "`recompute`"]),
    (["weights.on_update=recompute", "engine=fake"], ["does nothing with engine=fake", "on_update=keep"]),
    (["weights.delta=allways"], ["weights.delta must be one of never, always, auto", "`always`"]),
    (["weights.url=s3://b/run"], ["weights.url does nothing with weights.transport=broadcast", "Use weights=files"]),
    (
        ["weights=files", "weights.url=https://a/b"],
        ["the learner cannot write to a web server", "weights.fetch_url=https://a/b"],
    ),
    (["weights=files", "weights.url=ftp://me:word@h/x"], ["weights.url contains a password", "environment"]),
    (["weights=files", "weights.fetch_url=https://a/b"], ["without weights.url", "Set weights.url"]),
    (["weights.delta=auto"], ["weights.delta=auto does nothing with weights.transport=broadcast", "weights=files"]),
    (["weights.verify_every=-1"], ["weights.verify_every must be at least 0", "-1"]),
    (
        ["engine.tensor_parallel=2"],
        ["engine.tensor_parallel=2 does nothing with engine.name=transformers", "engine=vllm"],
    ),
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
    (["weights.transport=ipc"], ["weights.transport must be one of broadcast, files", "'ipc'"]),
    (["engine.dtype=fp32"], ["engine.dtype must be one of auto, float32, bfloat16", "'fp32'"]),
    (["engine.device=gpu"], ["engine.device must be auto, cpu, cuda or cuda:N", "'gpu'"]),
    (["rollout.host=proces"], ["rollout.host must be one of ray, process", "Did you mean `process`?"]),
    (["weights.transport=file"], ["weights.transport must be one of broadcast, files", "Did you mean `files`?"]),
    (["weights.wire_dtype=fp8"], ["weights.wire_dtype must be one of auto, float32, bfloat16", "'fp8'"]),
    (["rollout.drop_truncated=some"], ["rollout.drop_truncated must be one of never, any, all", "'some'"]),
    (
        ["rollout.drop_zero_variance=true", "rollout.group_size=1"],
        ["rollout.drop_zero_variance=true drops every group of size one", "rollout.group_size to 2"],
    ),
    (["rollout.zero_variance_of=acc"], ["rollout.zero_variance_of=acc says what rollout.drop_zero_variance compares"]),
    (
        ["reward=dapo", "reward.function=", "rollout.drop_zero_variance=true", "rollout.zero_variance_of=acc"],
        ["rollout.zero_variance_of=acc is no part of the reward", "right, overlong", "NAME/PART"],
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
    (["rollout.min_group_size=9"], ["at most rollout.group_size=8", "got 9", "0 requires all"]),
    (["rollout.min_group_size=1"], ["rollout.min_group_size=1 would train groups of one", "min_group_size=2 or more"]),
    (["rollout.group_size=1"], ["rollout.group_size must be at least 2", "always 0", "got 1", "baseline=none"]),
    (
        ["rollout.group_size=1", "advantage.baseline=none", "advantage.std=group"],
        ["rollout.group_size must be at least 2", "advantage.std=group"],
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
    (["weights.timeout_s=-3"], ["weights.timeout_s must be above 0", "-3"]),
    (["rollout.workers=0"], ["rollout.workers must be at least 1"]),
    (["rollout.max_in_flight=0"], ["rollout.max_in_flight must be at least 1"]),
    (["ray.gpus_per_worker=-1"], ["ray.gpus_per_worker must be at least 0"]),
    (["weights.host=0"], ["weights.host", "on every network", "10.0.0.6"]),
    (
        ["engine=vllm", "rollout.top_p=0.9", "rollout.top_k=50"],
        ["rollout.top_p=0.9 rollout.top_k=50 with engine=vllm", "is biased", "Use engine=transformers", "eval.top_p"],
    ),
    (["engine=vllm", "rollout.min_p=0.1"], ["rollout.min_p=0.1 with engine=vllm"]),
    (["rollout.top_p=0"], ["rollout.top_p must be above 0 and at most 1", "got 0"]),
    (["rollout.top_p=nan"], ["rollout.top_p must be above 0 and at most 1", "got nan"]),
    (["rollout.top_k=1"], ["rollout.top_k=1 always gives the likeliest token", "Set 2 or more, or 0"]),
    (["rollout.top_k=-1"], ["rollout.top_k must be at least 0 (0 turns it off); got -1"]),
    (
        ["rollout.top_p=0.9", "reference.path=rollout", "loss.kl_coef=0.1"],
        ["reference.path=rollout", "is not a KL", "reference.path=MODEL"],
    ),
    (["+rollout.top_k=5"], ["not added or removed", "Write `rollout.top_k=...`"]),
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
    (["model=Qwen/Qwen3"], ["Choices: hf,", "write `model.path=Qwen/Qwen3`"]),
    (["rollout.group_size=null"], ["`rollout.group_size=null` is refused", "not Optional"]),
    (
        ["model.checkpoint_every=2", "model.activation_checkpointing=false"],
        ["model.checkpoint_every=2 does nothing", "model.activation_checkpointing=true"],
    ),
    (
        ["model.checkpoint_keep=matmul", "model.activation_checkpointing=false"],
        ["model.checkpoint_keep=matmul does nothing", "activation_checkpointing=true"],
    ),
    (["model.compile=true", "learner.router_replay=true"], ["does not go with learner.router_replay=true"]),
    (
        ["model.compile=true", "learner.tensor_parallel=2", "learner.ranks=2"],
        ["model.compile=true cannot compile sums over ranks", "learner.tensor_parallel=2", "Set model.compile=false"],
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
    (["rollout.workers=100000"], ["rollout.workers must be at most 65,536", "got 100000", "Set rollout.workers=65536"]),
    (["weights.port=70000"], ["weights.port must be at most 65,535", "got 70000"]),
    (["weights.timeout_s=1e30"], ["weights.timeout_s must be at most 1,000,000", "got 1e+30"]),
    (["rollout.temperature=1e-3"], ["rollout.temperature must be 0.01 to 100; got 0.001", "vLLM samples at 0.01"]),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=names(REFUSED))
def test_a_refused_setting_says_the_rule_the_value_and_the_way_out(overrides: list[str], parts: list[str]) -> None:
    assert_refused(overrides, parts)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("spec_tokens", "a quarter of the tokens"),
        ("kv_offloading_size", "no update reaches"),
        ("cpu_offload_gb", "without an error"),
        ("enable_eplb", "without an error"),
        ("quantization", "no run has shown a version change"),
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
