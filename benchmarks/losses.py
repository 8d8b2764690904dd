"""What does composing a loss from parts cost against PPO-clip written by hand?

    python benchmarks/losses.py [tokens]

Forward and backward on packed tokens, one thread, median of several runs, interleaved so that a busy machine slows both
alike. The hand-written loss is given no diagnostics; the composed one is timed without and with them. `small` is the
size of a micro-batch in the quickstart. Prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.losses import LossInputs, policy_loss, preset

SMALL = 3500


def make_inputs(tokens: int) -> LossInputs:
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=generator)

    learner = -3 * torch.rand(tokens, generator=generator)
    sequence_ids = torch.arange(tokens) // 500
    return LossInputs(
        learner_logprobs=learner.clone().requires_grad_(),
        behavior_logprobs=learner + noise(0.1),
        advantages=noise(1.0),
        loss_mask=torch.rand(tokens, generator=generator) < 0.8,
        sequence_ids=sequence_ids,
        group_ids=sequence_ids // 8,
        staleness=torch.arange(tokens) % 5,
    )


def by_hand(inputs: LossInputs) -> Tensor:
    """PPO-clip as found in training scripts: exp, clamp, max, masked mean."""
    ratio = torch.exp(inputs.learner_logprobs - inputs.behavior_logprobs)
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * torch.clamp(ratio, 0.8, 1.2)
    return (torch.max(unclipped, clipped) * inputs.loss_mask).sum() / inputs.loss_mask.sum()


def timed(inputs: LossInputs, loss: Callable[[], Tensor]) -> float:
    inputs.learner_logprobs.grad = None
    start = time.perf_counter()
    loss().backward()
    return time.perf_counter() - start


def measure(tokens: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each loss."""
    inputs = make_inputs(tokens)
    config = preset("ppo")
    losses: dict[str, Callable[[], Tensor]] = {
        "by_hand_ms": lambda: by_hand(inputs),
        "composed_ms": lambda: policy_loss(inputs, config, diagnostics=False).loss,
        "composed_with_diagnostics_ms": lambda: policy_loss(inputs, config).loss,
    }
    torch.testing.assert_close(losses["by_hand_ms"](), losses["composed_ms"]())
    runs = {name: [timed(inputs, loss) for _ in range(1)] for name, loss in losses.items()}
    for _ in range(rounds):
        for name, loss in losses.items():
            runs[name].append(timed(inputs, loss))
    return {name: round(1e3 * statistics.median(times[1:]), 3) for name, times in runs.items()}


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    torch.set_num_threads(1)
    large, small = measure(tokens, 15), measure(SMALL, 200)
    result = {
        "benchmark": "losses",
        "tokens": tokens,
        **large,
        "ratio": round(large["composed_ms"] / large["by_hand_ms"], 2),
        "ratio_with_diagnostics": round(large["composed_with_diagnostics_ms"] / large["by_hand_ms"], 2),
        **{f"small_{name}": value for name, value in small.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
