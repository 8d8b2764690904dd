"""How many tokens per second does the transformers engine generate, compared with a bare loop over the same model, and
while a learner publishes a version in every round?

    python -m benchmarks.engine [--prompts 32] [--n 8] [--new 10] [--rounds 20]

The bare loop is the minimum: one padded batch, prefill, DynamicCache, multinomial, no requests, no versions. Versions
come from a separate learner process through the broadcast. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import DynamicCache

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.types import SamplingParams
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.publishing.publisher import WeightPublisher
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.board import TIMEOUT_S, BoardManager, Rendezvous
from benchmarks.parts.model import tiny_model

SMOKE = {"prompts": 2, "n": 2, "new": 3, "rounds": 1}


@torch.inference_mode()
def bare_loop(model: torch.nn.Module, prompts: np.ndarray, n: int, new: int) -> int:
    """Generate one batch of `len(prompts) * n` rows, `new` tokens each. Returns the number of tokens."""
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


def learner_process(board: Any, wanted: Any) -> None:
    """Publish each version that arrives in the queue `wanted`."""
    torch.set_num_threads(1)
    policy = PolicyModel(tiny_model())  # pyright: ignore[reportArgumentType]
    publisher = WeightPublisher(
        BroadcastSender(board, Link(host="127.0.0.1", timeout_s=TIMEOUT_S)),
        wire_dtype=torch.float32,
        bucket_bytes=64 << 20,
        wait_s=TIMEOUT_S,
    )
    while True:
        version = wanted.get()
        publisher.publish(version, policy.named_hf_parameters())


class Updates:
    """An engine's subscriber, and the learner process that publishes to it."""

    def __init__(self, engine: TransformersEngine, board: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._wanted = context.Queue()
        self._learner = context.Process(target=learner_process, args=(board, self._wanted), daemon=True)
        self._learner.start()
        self._version = 0
        board.join("w")
        self._subscriber = BroadcastSubscriber(
            Rendezvous(board, [0.0]), engine.load_weights, worker="w", incarnation="1", timeout_s=TIMEOUT_S
        )

    def publish(self) -> None:
        self._version += 1
        self._wanted.put(self._version)

    def wait(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self._subscriber.policy_version != self._version:
            self._subscriber.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"version {self._version} was not served in {TIMEOUT_S} s")
            time.sleep(0.001)

    def close(self) -> None:
        self._subscriber.close()
        self._learner.kill()
        self._learner.join(10)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--new", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    args = parse(parser, SMOKE)
    torch.set_num_threads(1)
    model = tiny_model().eval()
    prompts = np.random.default_rng(0).integers(3, 260, (args.prompts, 7))
    engine = TransformersEngine(ModelRunner(model, torch.device(args.device), args.prompts * args.n))
    bare, quiet, updated = [], [], []
    with BoardManager() as manager:
        updates = Updates(engine, manager.Board())  # pyright: ignore
        for round_ in range(args.rounds + 2):
            started = time.perf_counter()
            made = bare_loop(model, prompts, args.n, args.new) if args.device == "cpu" else 0
            bare.append(made / (time.perf_counter() - started))
            for rates, publishes in ((quiet, False), (updated, True)):
                started = time.perf_counter()
                if publishes:
                    updates.publish()
                tokens = await engine_round(engine, prompts, args.n, args.new, 1000 * round_)
                rates.append(tokens / (time.perf_counter() - started))
            await asyncio.to_thread(updates.wait)
        updates.close()
    await engine.close()
    medians = [float(np.median(rates[2:])) for rates in (bare, quiet, updated)]
    result = {
        "device": args.device,
        "parameters": sum(p.numel() for p in model.parameters()),
        "rows": args.prompts * args.n,
        "engine_tokens_per_s": round(medians[1]),
        "bare_loop_tokens_per_s": round(medians[0]),
        "updating_every_round_tokens_per_s": round(medians[2]),
        "updating_over_not": round(medians[2] / medians[1], 3),
    }
    answer("engine", result, smoke=args.smoke)


if __name__ == "__main__":
    asyncio.run(main())
