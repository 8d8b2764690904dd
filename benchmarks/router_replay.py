"""How far are the log-probs of a mixture-of-experts learner from those of the engine that sampled, with
`learner.router_replay` and without, and what does it cost?

    python -m benchmarks.router_replay [--rounds 5] [--layers 8] [--experts 32] [--chosen 4]

The model is a random Qwen3-MoE whose experts differ strongly. The built-in engine samples in bfloat16. The learner
scores the same weights in float32 and in bfloat16, and in bfloat16 also weights that are like some steps newer (each
moved at random by 0.5 % of its tensor's standard deviation). All in one process, on one thread. Gaps are differences of
log-probs per sampled token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.environments.transcript import Transcript
from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.model.layout import Layout, use_layout
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.model.routing import RouterReplay
from asyncrl.learner.step.scoring import unrouted
from asyncrl.replay.codec.group import check_stored, encode_group, split_frames
from asyncrl.replay.protocol import Lease
from asyncrl.types import SamplingParams, StepPlan, Trajectory, TrajectoryGroup
from benchmarks.parts.answer import answer, parse

CPU = torch.device("cpu")
NEWER = 0.005
VOCABULARY = 1024


def mixture(given: argparse.Namespace, newer: float = 0.0) -> PreTrainedModel:
    """Return a model with hidden size 128. The outputs of its experts are scaled up: with a plain random start, taking
    one expert instead of another would hardly change the log-probs."""
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=given.layers, num_attention_heads=4,
            num_key_value_heads=2, moe_intermediate_size=64, num_experts=given.experts,
            num_experts_per_tok=given.chosen, norm_topk_prob=True, max_position_embeddings=1024,
            initializer_range=0.06,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(8.0 if "experts.down_proj" in name else 1.0)
            if newer and parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * newer)
    return model


def policy_of(model: PreTrainedModel, dtype: torch.dtype) -> PolicyModel:
    policy = PolicyModel(model.to(dtype).eval())  # pyright: ignore[reportArgumentType]
    use_layout(policy, Layout.PACKED)
    policy.replay = RouterReplay(policy, "the benchmark's model")
    return policy


async def sampled(engine: TransformersEngine, given: argparse.Namespace, seed: int, *, routing: bool) -> list[Any]:
    """Return each prompt with its completions."""
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=given.new, record_routing=routing)
    prompts = rng.integers(3, VOCABULARY, (given.prompts, given.prompt), np.int32)
    asked = (
        GenerateRequest(request_id=str(i), prompt_ids=prompt, n=given.n, sampling=sampling, seed=seed + i)
        for i, prompt in enumerate(prompts)
    )
    return list(zip(prompts, await asyncio.gather(*map(engine.generate, asked)), strict=True))


def trajectory_of(prompt: np.ndarray, completion: Any) -> Trajectory:
    transcript = Transcript(prompt)
    transcript.add_completion(completion)
    return transcript.trajectory(1.0)


def groups_of(made: list[Any]) -> list[TrajectoryGroup]:
    return [
        TrajectoryGroup(
            group_id=place,
            prompt_index=place,
            attempt=0,
            worker="w",
            trajectories=tuple(trajectory_of(prompt, each) for each in completions),
        )
        for place, (prompt, completions) in enumerate(made)
    ]


def packed(groups: list[TrajectoryGroup], policy: PolicyModel) -> MicroBatch:
    encoded = [encode_group(group) for group in groups]
    members = tuple((g, t) for g, group in enumerate(groups) for t in range(len(group.trajectories)))
    headers = tuple(each.header for each in encoded)
    plan = StepPlan(
        step=0, policy_version=0, groups=headers, staleness={0: 0}, max_staleness=0, shards=(members,)
    )  # fmt: skip
    lease = Lease(plan=plan, trajectories={(g, t): groups[g].trajectories[t] for g, t in members}, samples=())
    return pack(lease, members, CPU, routers=policy.routers)


def logprobs(policy: PolicyModel, batch: MicroBatch) -> Tensor:
    return policy(batch, 1.0)[0]


def gaps(policy: PolicyModel, batch: MicroBatch) -> dict[str, Any]:
    """Return the gaps to the log-probs that the engine recorded, with own and with replayed routing."""
    places, found = batch.loss_positions, {}
    assert policy.replay is not None
    for name, each in (("own", unrouted(batch)), ("replayed", batch)):
        gap = (logprobs(policy, each) - batch.behavior_logprobs)[places].detach().double()
        found |= {
            f"{name}_mean": float(f"{gap.abs().mean():.3g}"),
            f"{name}_p99": float(f"{gap.abs().quantile(0.99):.3g}"),
            f"{name}_kl": float(f"{(gap.expm1() - gap).mean():.3g}"),
        }
    changed, choices = policy.replay.told() or (torch.zeros(()), torch.ones(()))
    return found | {"changed_percent": round(100 * float(changed / choices), 2)}


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def costs(given: argparse.Namespace, engine: TransformersEngine, policy: PolicyModel) -> dict[str, float]:
    """Return what recording and replaying the routing cost: medians of alternating rounds with and without it."""
    took: dict[str, list[float]] = {}
    made: list[Any] = []
    for seed in range(given.rounds + 1):
        for routing in (False, True):
            started = time.perf_counter()
            made = asyncio.run(sampled(engine, given, seed, routing=routing))
            took.setdefault(f"engine{routing}", []).append(time.perf_counter() - started)
        batch = packed(groups_of(made), policy)
        for routing, each in ((False, unrouted(batch)), (True, batch)):
            took.setdefault(f"learner{routing}", []).append(
                seconds(lambda each=each: logprobs(policy, each).sum().backward())
            )
        (group, *_) = groups_of(made)
        encoded = encode_group(group)
        stored = split_frames(encoded.header, encoded.frames)
        for name, routers in (("False", None), ("True", policy.routers)):
            took.setdefault(f"door{name}", []).append(
                seconds(
                    lambda stored=stored, header=encoded.header, routers=routers: check_stored(
                        header, stored, VOCABULARY, routers
                    )
                )
            )
    medians = {name: float(np.median(values[1:])) for name, values in took.items()}
    groups = groups_of(made)
    tokens = sum(len(each.token_ids) for group in groups for each in group.trajectories)
    extras = sum(array.nbytes for group in groups for each in group.trajectories for array in each.extras.values())
    whole = sum(encode_group(group).header.nbytes for group in groups)
    return {
        "bytes_per_token": round((whole - extras) / tokens, 1),
        "routing_bytes_per_token": round(extras / tokens, 1),
        "engine_slower": round(medians["engineTrue"] / medians["engineFalse"], 3),
        "learner_slower": round(medians["learnerTrue"] / medians["learnerFalse"], 3),
        "door_us_per_kilotoken": round(1e9 * (medians["doorTrue"] - medians["doorFalse"]) * len(groups) / tokens, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parse(parser, {"layers": 2, "experts": 8, "chosen": 2, "prompts": 1, "n": 2, "new": 4, "rounds": 1})
    torch.set_num_threads(1)
    engine = TransformersEngine(ModelRunner(mixture(given).bfloat16(), CPU, given.prompts * given.n))
    asyncio.run(load(engine, mixture(given)))
    made = groups_of(asyncio.run(sampled(engine, given, 0, routing=True)))
    learners = {
        "learner_float32": policy_of(mixture(given), torch.float32),
        "learner_bfloat16": policy_of(mixture(given), torch.bfloat16),
        "newer_bfloat16": policy_of(mixture(given, NEWER), torch.bfloat16),
    }
    result: dict[str, Any] = {name: gaps(policy, packed(made, policy)) for name, policy in learners.items()}
    result["costs"] = costs(given, engine, learners["learner_float32"])
    asyncio.run(engine.close())
    answer("router_replay", result, smoke=given.smoke)


async def load(engine: TransformersEngine, model: PreTrainedModel) -> None:
    weights = {name: each.detach().to(torch.bfloat16) for name, each in model.named_parameters()}
    await asyncio.to_thread(engine.load_weights, 0, weights)


if __name__ == "__main__":
    main()
