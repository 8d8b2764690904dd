"""Rules for engines and weight transports: settings that cannot work together."""

from __future__ import annotations

import math
from collections.abc import Callable

from asyncrl.checks.problem import Problems
from asyncrl.checks.servers import SERVERS, refused
from asyncrl.schema import Config


def engine_has_keys(config: Config) -> Problems:
    if config.weights.on_update == "recompute" and config.engine.name == "fake":
        yield "weights.on_update=recompute does nothing with engine=fake, which has no keys. Set weights.on_update=keep"


def servers_can_be_used(config: Config) -> Problems:
    engine = config.engine
    if engine.name not in SERVERS:
        for key, value in (("urls", engine.urls), ("key_env", engine.key_env)):
            if value:
                yield f"engine.{key} does nothing with engine={engine.name}. Use engine=server, or remove it"
        return
    yield from refused(engine)
    if config.rollout.workers > len(engine.urls) > 0:
        yield (
            f"rollout.workers={config.rollout.workers} is more than the number of servers, {len(engine.urls)} in "
            f"engine.urls, and each server belongs to one worker. Set rollout.workers={len(engine.urls)} or less: one "
            "worker can use several servers"
        )
    if config.model.lora_rank > 0:
        yield f"model.lora_rank={config.model.lora_rank} is not supported with engine={engine.name}. Use engine=vllm"
    if engine.name == "sglang":
        if config.rollout.temperature != 1.0:
            yield (
                f"rollout.temperature={config.rollout.temperature} with engine=sglang: its log-probs may be those "
                "before the temperature. That depends on SGLANG_RETURN_ORIGINAL_LOGPROB, which the server does not "
                "report. Set rollout.temperature=1"
            )
        return
    if config.weights.transport != "broadcast":
        yield f"weights.transport={config.weights.transport} is not supported with engine=server. Use weights=broadcast"


def wide_heads_have_a_use(config: Config) -> Problems:
    model, engine = config.model, config.engine
    if model.fp32_head and model.dtype == engine.dtype == "float32":
        yield (
            "model.fp32_head=true does nothing with model.dtype=float32 and engine.dtype=float32: the logits are "
            "float32 already. Leave it out, or set model.dtype=bfloat16"
        )


def likeliest_tokens_are_recorded(config: Config) -> Problems:
    if config.loss.centering and config.engine.record_topk < 1:
        yield (
            "loss.centering=true needs the likeliest tokens at each position, which the engine records with "
            f"engine.record_topk above 0; got {config.engine.record_topk}. Set engine.record_topk=64 (for a rerun, "
            "take a run that had it)"
        )
    if config.engine.record_topk and config.engine.name in ("fake", *SERVERS):
        yield (
            f"engine.record_topk={config.engine.record_topk} needs engine=transformers or engine=vllm; got "
            f"engine={config.engine.name}. Set engine.record_topk=0"
        )


def experts_are_recorded(config: Config) -> Problems:
    if config.learner.router_replay and config.engine.name != "transformers":
        yield (
            "learner.router_replay=true needs engine=transformers, which records the experts of each token; "
            f"engine={config.engine.name} does not. Set learner.router_replay=false, or use engine=transformers"
        )


def adapters_keep_their_keys(config: Config) -> Problems:
    if config.engine.name == "vllm" and config.model.lora_rank > 0 and config.weights.on_update == "recompute":
        yield (
            f"weights.on_update=recompute does nothing with model.lora_rank={config.model.lora_rank}: a sequence "
            "finishes under the adapter it began with. Set weights.on_update=keep"
        )


OTHER_PROCESSES = ("pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size", "nnodes")
"""Arguments of vLLM that give an engine more processes than `engine.tensor_parallel` counts."""
EXECUTORS = ("mp", "uni")


def engine_processes_are_its_own(config: Config) -> Problems:
    """Every process of an engine must be a rank of the weight group and a child of its rollout worker."""
    extra = config.engine.vllm
    for key in OTHER_PROCESSES:
        if extra.get(key, 1) != 1:
            yield (
                f"engine.vllm.{key}={extra[key]}: an engine is engine.tensor_parallel processes on one machine, each "
                "a member of the weight group. Raise engine.tensor_parallel, or rollout.workers for more engines"
            )
    executor = extra.get("distributed_executor_backend", "mp")
    if executor not in EXECUTORS:
        yield (
            f"engine.vllm.distributed_executor_backend={executor}: vLLM's processes must be children of their rollout "
            "worker, on its machine, so that they end with it (mp; under Ray, the worker's placement group has room "
            "for all of them). Leave it out. Tensor parallelism over several machines is not supported"
        )


ANOTHER_DISTRIBUTION = (
    "generation_config", "override_generation_config", "logits_processors", "logits_processor_pattern",
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "watermark_config",
)  # fmt: skip
"""Arguments under engine.vllm that change, or are meant to change, the distribution from which tokens are sampled."""


def tokens_are_drawn_from_the_policy(config: Config) -> Problems:
    """Refuse arguments of vLLM that change the distribution; see also `hints.REFUSED_ON_PURPOSE`, and `sampling` for
    truncation that is recorded."""
    for key in ANOTHER_DISTRIBUTION:
        if key in config.engine.vllm:
            yield (
                f"engine.vllm.{key}={config.engine.vllm[key]}: tokens drawn from anything but the whole distribution "
                "have log-probs that are not the policy's, which biases every importance ratio. Leave it out: "
                "rollout.temperature stays exact, rollout.top_p, top_k and min_p with engine=transformers, and "
                "evaluations have eval.top_p, top_k and min_p"
            )


DRAFTED = (
    "tokens are drafted and then accepted or replaced; with vLLM 0.32 on a CPU the log-probs recorded for a quarter of "
    "the tokens were not the model's"
)
KEPT_KEYS = (
    "keys are kept where no update reaches them: tokens could be drawn over the keys of another version than the one "
    "that they are recorded with"
)
MOVED_WEIGHTS = (
    "vLLM's reload does not write weights that lie elsewhere than it put them: an update could leave old ones in use, "
    "without an error"
)
REQUANTIZED = (
    "no run has shown a version change under it: vLLM would have to quantize every version again, and nothing shows "
    "whether it does"
)
UNPROVEN = {
    "quantization": REQUANTIZED,
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), DRAFTED),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_size", "ec_transfer_config"), KEPT_KEYS),
    **dict.fromkeys(
        ("cpu_offload_gb", "cpu_offload_params", "offload_group_size", "offload_params", "enable_eplb"), MOVED_WEIGHTS
    ),
}
"""Arguments under engine.vllm that make log-probs or versions wrong, or were not tested in this respect, and why."""


def versions_and_logprobs_stay_true(config: Config) -> Problems:
    for key, reason in UNPROVEN.items():
        value = config.engine.vllm.get(key)
        if value:
            yield f"engine.vllm.{key}={value}: {reason}. Leave it out"


def gpus_hold_the_engine(config: Config) -> Problems:
    gpus, parallel = config.ray.gpus_per_worker, config.engine.tensor_parallel
    if config.rollout.host == "ray" and 0 < gpus != parallel and parallel > 1:
        yield (
            f"ray.gpus_per_worker={gpus:g} must be engine.tensor_parallel={parallel}: an engine of {parallel} "
            f"processes needs as many GPUs, on one machine. Set ray.gpus_per_worker={parallel}"
        )


LEAST_OF_A_GPU = 0.0001
"""Ray counts in steps of this."""


def gpus_are_whole_or_parts_of_one(config: Config) -> Problems:
    for key, gpus in (("ray.gpus_per_worker", config.ray.gpus_per_worker), ("reward.gpus", config.reward.gpus)):
        if 1 < gpus < math.inf and gpus % 1:
            yield f"{key}={gpus:g}: Ray gives a part of one GPU, or whole ones. Set {key}={math.ceil(gpus)}"
        elif 0 < gpus < LEAST_OF_A_GPU:
            yield f"{key}={gpus:g} is less than Ray can give of a GPU. Set {key}=0, or at least {LEAST_OF_A_GPU}"


def urls_are_of_files(config: Config) -> Problems:
    weights = config.weights
    for key, url in (("url", weights.url), ("fetch_url", weights.fetch_url)):
        if url and weights.transport != "files":
            yield (
                f"weights.{key} does nothing with weights.transport={weights.transport}. Use weights=files, or remove "
                "it"
            )
        elif ":" in url.partition("://")[2].partition("/")[0].rpartition("@")[0]:
            yield (
                f"weights.{key} contains a password, and settings are written to files and logs. Pass it through the "
                "environment, or in the settings files of fsspec"
            )
    if weights.fetch_url and not weights.url and weights.transport == "files":
        yield (
            f"weights.fetch_url={weights.fetch_url} without weights.url: workers read in the run folder. Set "
            "weights.url to the place that is served there"
        )
    if weights.url.startswith(("http://", "https://")):
        yield (
            f"weights.url={weights.url}: the learner cannot write to a web server. Set weights.url to a place that it "
            f"can write to (s3://..., a folder), and weights.fetch_url={weights.url} for the workers"
        )


def deltas_are_of_files(config: Config) -> Problems:
    if config.weights.delta != "never" and config.weights.transport == "broadcast":
        yield (
            f"weights.delta={config.weights.delta} does nothing with weights.transport=broadcast, which sends whole "
            "versions. Set weights.delta=never, or use weights=files"
        )


RULES: tuple[Callable[[Config], Problems], ...] = (
    engine_has_keys,
    servers_can_be_used,
    likeliest_tokens_are_recorded,
    experts_are_recorded,
    wide_heads_have_a_use,
    adapters_keep_their_keys,
    engine_processes_are_its_own,
    tokens_are_drawn_from_the_policy,
    versions_and_logprobs_stay_true,
    gpus_hold_the_engine,
    gpus_are_whole_or_parts_of_one,
    urls_are_of_files,
    deltas_are_of_files,
)
