"""How many tokens per second does the transformers engine make, beside a bare loop over the same model?

    python benchmarks/engine.py [--prompts 32] [--n 8] [--new 10] [--rounds 20]

The bare loop is the least one can do: one padded batch, prefill, DynamicCache, multinomial, no requests, no versions.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.runner import ModelRunner
from asyncrl.engines.transformers import TransformersEngine
from asyncrl.types import SamplingParams


def tiny_model() -> torch.nn.Module:
    """149 k parameters: hidden 64, 2 layers, 2 heads of 32, vocabulary 264."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=264, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.inference_mode()
def bare_loop(model: torch.nn.Module, prompts: np.ndarray, n: int, new: int) -> int:
    """One batch of `len(prompts) * n` rows, `new` tokens each; returns the tokens made."""
    ids = torch.from_numpy(prompts).repeat_interleave(n, 0)
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    for step in range(new):
        logprobs = torch.log_softmax(logits.float(), -1)
        token = torch.multinomial(logprobs.exp(), 1)
        logprobs.gather(1, token)
        if step + 1 < new:
            logits = model(input_ids=token, past_key_values=cache).logits[:, -1]
    return len(ids) * new


async def engine_round(engine: TransformersEngine, prompts: np.ndarray, n: int, new: int, seed: int) -> int:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new)
    requests = [
        GenerateRequest(request_id=str(i), prompt_ids=prompt.astype(np.int32), n=n, sampling=sampling, seed=seed + i)
        for i, prompt in enumerate(prompts)
    ]
    groups = await asyncio.gather(*(engine.generate(request) for request in requests))
    return sum(len(completion.token_ids) for group in groups for completion in group)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--new", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model().eval()
    prompts = np.random.default_rng(0).integers(3, 260, (args.prompts, 7))
    engine = TransformersEngine(ModelRunner(model, torch.device(args.device), args.prompts * args.n))
    bare, ours = [], []
    for round_ in range(args.rounds + 2):
        started = time.perf_counter()
        made = bare_loop(model, prompts, args.n, args.new) if args.device == "cpu" else 0
        middle = time.perf_counter()
        tokens = await engine_round(engine, prompts, args.n, args.new, 1000 * round_)
        if round_ >= 2:
            bare.append(made / (middle - started))
            ours.append(tokens / (time.perf_counter() - middle))
    await engine.close()
    print(
        json.dumps(
            {
                "benchmark": "engine",
                "device": args.device,
                "parameters": sum(p.numel() for p in model.parameters()),
                "rows": args.prompts * args.n,
                "engine_tokens_per_s": round(float(np.median(ours))),
                "bare_loop_tokens_per_s": round(float(np.median(bare))),
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main())
