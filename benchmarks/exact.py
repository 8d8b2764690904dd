"""What does `engine.exact` cost, in tokens per second of the engine and of the learner with it and without?

    python -m benchmarks.exact [--rounds 5] [--prompt 32]

One process with one thread alternates between both settings. The engine generates 32 completions of 32 tokens after
prompts of 32 tokens; the learner computes forward and backward over as many, with the 8 completions of a prompt packed
behind it. The models are random Qwen2 models: the quickstart's, and one with 4 layers of width 256.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.learner.batch.packing import Pack, plan_packing
from asyncrl.learner.model.layout import Layout, use_layout
from asyncrl.learner.model.policy import PolicyModel, compute_exactly
from benchmarks.engine import engine_round
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.model import tiny_model

CPU = torch.device("cpu")
SIBLINGS = 8


def larger_model() -> PreTrainedModel:
    """4 M parameters: hidden 256, 4 layers, 4 heads of 64, vocabulary 2048."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def policy_of(model: PreTrainedModel, exact: bool) -> PolicyModel:
    policy = PolicyModel(model)
    use_layout(policy, Layout.PACKED)
    if exact:
        compute_exactly(policy, CPU)
    return policy


def packed(prompts: int, length: int, new: int) -> Pack:
    """Return a pack in which `SIBLINGS` completions of each prompt share it; completion tokens are scored."""
    rows: list[np.ndarray] = []
    positions, chosen, before, start = [], [], [], 0
    for _ in range(prompts):
        shared = start + np.arange(length)
        positions.append(np.arange(length))
        for sibling in range(SIBLINGS):
            own = start + length + sibling * new + np.arange(new)
            rows.append(np.concatenate([shared, own]))
            positions.append(length + np.arange(new))
            chosen.append(own)
            before.append(np.append(shared[-1], own[:-1]))
        start += length + SIBLINGS * new
    packing = plan_packing(np.concatenate(rows), np.full(len(rows), length + new), start)
    ids = np.random.default_rng(0).integers(3, 260, start)
    arrays = (ids, *map(np.concatenate, (positions, chosen, before)))
    ids, places, chosen, before = (torch.from_numpy(array) for array in arrays)
    return Pack(input_ids=ids, position_ids=places, loss_positions=chosen, predictors=before, packing=packing)


def learner_rate(policy: PolicyModel, prompts: int, length: int, new: int) -> float:
    """Return the completion tokens per second of one forward and backward."""
    pack = packed(prompts, length, new)
    started = time.perf_counter()
    policy(pack, 1.0)[0].sum().backward()
    return prompts * SIBLINGS * new / (time.perf_counter() - started)


def engine_rate(engine: TransformersEngine, prompts: int, length: int, new: int, seed: int) -> float:
    ids = np.random.default_rng(seed).integers(3, 260, (prompts, length))
    started = time.perf_counter()
    made = asyncio.run(engine_round(engine, ids, SIBLINGS, new, seed))
    return made / (time.perf_counter() - started)


def measured(make: Callable[[], PreTrainedModel], given: argparse.Namespace) -> dict[str, float]:
    kinds = (False, True)
    engines = {
        exact: TransformersEngine(ModelRunner(make(), CPU, given.prompts * SIBLINGS, exact=exact)) for exact in kinds
    }
    policies = {exact: policy_of(make(), exact) for exact in kinds}
    rates: dict[tuple[str, bool], list[float]] = {
        (part, exact): [] for part in ("engine", "learner") for exact in kinds
    }
    size = given.prompts, given.prompt, given.new
    for seed in range(given.rounds + 1):
        for exact in kinds:
            rates["engine", exact].append(engine_rate(engines[exact], *size, seed))
            rates["learner", exact].append(learner_rate(policies[exact], *size))
    for engine in engines.values():
        asyncio.run(engine.close())
    medians = {key: float(np.median(values[1:])) for key, values in rates.items()}
    result = {"parameters": float(sum(parameter.numel() for parameter in policies[True].parameters()))}
    for part in ("engine", "learner"):
        result |= {
            f"{part}_tokens_per_s": round(medians[part, False]),
            f"{part}_exact_tokens_per_s": round(medians[part, True]),
            f"{part}_slower": round(medians[part, False] / medians[part, True], 2),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parse(parser, {"prompts": 1, "prompt": 4, "new": 2, "rounds": 1})
    torch.set_num_threads(1)
    sizes = {"tiny": tiny_model} if given.smoke else {"tiny": tiny_model, "larger": larger_model}
    answer("exact", {name: measured(make, given) for name, make in sizes.items()}, smoke=given.smoke)


if __name__ == "__main__":
    main()
