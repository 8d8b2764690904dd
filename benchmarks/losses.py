"""What does composing a loss from parts cost, and what do chunked log-probs save?

    python -m benchmarks.losses [--tokens 1000000] [--vocabulary 150000] [--rows 2048] [--width 256]

Losses: forward and backward of the composed PPO-clip against one written by hand, on packed tokens, one thread. The
hand-written loss computes no diagnostics; the composed one is timed without and with them. `small` is the size of a
micro-batch in the quickstart.

Log-probs: from hidden states to the log-probs of the sampled tokens and back to all gradients, chunked as in the
learner (which also gives the entropy) and by log_softmax over the whole table, each in a process of its own. `peak_mb`
is how much memory the process grew beyond its inputs.

Times are processor time, the best of several rounds. A ratio is the median over the rounds, since both losses of a
round meet the same other work on the machine. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.learner.model.logprobs import token_logprobs
from asyncrl.losses import LossInputs, policy_loss, preset
from benchmarks.parts.answer import answer, parse

SMALL = 3500
SMOKE = {"tokens": 2000, "vocabulary": 500, "rows": 64, "width": 16, "rounds": 1}


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
    start = time.process_time()
    loss().backward()
    return time.process_time() - start


def measure(tokens: int, rounds: int) -> dict[str, float]:
    """Return the least milliseconds of each loss, and the median over the rounds of its time over the hand-written."""
    inputs = make_inputs(tokens)
    config = preset("ppo")
    losses: dict[str, Callable[[], Tensor]] = {
        "by_hand_ms": lambda: by_hand(inputs),
        "composed_ms": lambda: policy_loss(inputs, config, diagnostics=False).loss,
        "composed_with_diagnostics_ms": lambda: policy_loss(inputs, config).loss,
    }
    torch.testing.assert_close(losses["by_hand_ms"](), losses["composed_ms"]())
    taken: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(rounds):
        for name, loss in losses.items():
            taken[name].append(timed(inputs, loss))

    def ratio(name: str) -> float:
        return round(statistics.median(a / b for a, b in zip(taken[name], taken["by_hand_ms"], strict=True)), 2)

    least = {name: round(1e3 * min(seconds), 3) for name, seconds in taken.items()}
    return least | {"ratio": ratio("composed_ms"), "ratio_with_diagnostics": ratio("composed_with_diagnostics_ms")}


def logprob_path(path: str, rows: int, vocabulary: int, width: int) -> dict[str, float]:
    """Return the processor seconds and the growth of peak memory (MiB) of one way to the log-probs, in this process."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = float("inf")
    for _ in range(2):
        hidden.grad = weight.grad = None
        start = time.process_time()
        if path == "chunked":
            logprobs, _ = token_logprobs(hidden, weight, None, targets, 1.0)
        else:
            logprobs = functional.linear(hidden, weight).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        logprobs.sum().backward()
        best = min(best, time.process_time() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {f"{path}_s": round(best, 2), f"{path}_peak_mb": round(grown)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 1_000_000), ("vocabulary", 150_000), ("rows", 2048), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--path", choices=("chunked", "whole"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=25, help="of the large losses; eight times as many of the small")
    given = parse(parser, SMOKE)
    torch.set_num_threads(1)
    if given.path:
        print(json.dumps(logprob_path(given.path, given.rows, given.vocabulary, given.width)))
        return
    large, small = measure(given.tokens, given.rounds), measure(SMALL, 8 * given.rounds)
    result = {
        "tokens": given.tokens,
        **large,
        **{f"small_{name}": value for name, value in small.items()},
        "vocabulary": given.vocabulary,
        "rows": given.rows,
        "width": given.width,
    }
    for path in ("whole", "chunked"):
        command = [sys.executable, "-m", "benchmarks.losses", *sys.argv[1:], "--path", path]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result |= json.loads(done.stdout)
    answer("losses", result, smoke=given.smoke)


if __name__ == "__main__":
    main()
