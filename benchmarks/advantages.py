"""How long do advantages with a critic take for 256 sequences of 16 k tokens?

    python -m benchmarks.advantages [--rows 256] [--width 16384] [--rounds 15]

`gae`, `vtrace` and `retrace` on one thread, over tables [rows, width]: `full`, every token sampled; `ragged`, each
sequence between a quarter of the width and all of it; `turns`, of those in every 1,000 tokens 200 observations. `copy`
copies two tables and the mask into existing memory: the least that `gae` must read and write. `error` is the largest
difference to a loop over tokens in numpy, in float64, relative to the largest result of the loop.

Times are milliseconds of processor time, the least of the rounds, which take each in turn. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.advantages import gae, retrace, vtrace
from benchmarks.parts.answer import answer, parse

SMOKE = {"rows": 3, "width": 700, "rounds": 1}
GAMMA, LAM = 0.99, 0.95
Estimate = Callable[[], tuple[Tensor, ...]]


def masks(rows: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    place = torch.arange(width)
    ragged = place < torch.randint(-(-width // 4), width + 1, (rows, 1), generator=generator)
    return {"full": torch.ones(rows, width, dtype=torch.bool), "ragged": ragged, "turns": ragged & (place % 1000 < 800)}


def estimates(rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> dict[str, Estimate]:
    return {
        "gae": partial(gae, rewards, values, mask, GAMMA, LAM),
        "vtrace": partial(vtrace, rewards, values, log_ratio, mask, GAMMA, LAM),
        "retrace": partial(retrace, rewards, values, log_ratio, mask, GAMMA, LAM),
    }


def by_a_loop(name: str, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> NDArray[np.float64]:
    """The advantages, from the papers' recursions, token by token from the last to the first of all rows at once."""
    r, v, logs = (each.double().numpy() for each in (rewards, values, log_ratio))
    inside, capped = mask.numpy(), np.minimum(np.exp(logs), 1.0)
    out = np.zeros_like(r)
    after, error, credit, cut = (np.zeros(len(r)) for _ in range(4))
    for t in range(r.shape[1] - 1, -1, -1):
        at, c = inside[:, t], capped[:, t]
        delta = r[:, t] + GAMMA * after - v[:, t]
        if name == "vtrace":
            out[:, t] = np.where(at, c * (delta + GAMMA * LAM * error), 0.0)
            error = np.where(at, c * delta + GAMMA * LAM * c * error, error)
        else:
            found = delta + GAMMA * LAM * (credit if name == "gae" else cut * credit)
            out[:, t] = np.where(at, found, 0.0)
            credit, cut = np.where(at, found, credit), np.where(at, c, cut)
        after = np.where(at, v[:, t], after)
    return out


def copied(tables: tuple[Tensor, ...], mask: Tensor) -> Callable[[], None]:
    sources = *tables[:2], mask
    kept = [each.clone() for each in sources]

    def copy() -> None:
        for target, source in zip(kept, sources, strict=True):
            target.copy_(source)

    return copy


def measure(rows: int, width: int, rounds: int, dtype: torch.dtype) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    rewards, values, log_ratio = (torch.randn(rows, width, generator=generator, dtype=dtype) for _ in range(3))
    log_ratio *= 0.1
    tables, work, errors = (rewards, values, log_ratio), dict[str, Callable[[], object]](), dict[str, float]()
    for kind, mask in masks(rows, width, generator).items():
        for name, estimate in estimates(*tables, mask).items():
            expected = by_a_loop(name, *tables, mask)
            apart = np.abs(estimate()[0].double().numpy() - expected).max() / np.abs(expected).max()
            errors[name] = max(errors.get(name, 0.0), float(apart))
            work[f"{name}_{kind}"] = estimate
        if kind == "full":
            work["copy"] = copied(tables, mask)
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            started = time.process_time()
            call()
            taken[name].append(1e3 * (time.process_time() - started))
    least = {f"{name}_ms": round(min(each), 1) for name, each in taken.items()}
    return least | {f"{name}_error": float(f"{error:.1g}") for name, error in errors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=15)
    given = parse(parser, SMOKE)
    torch.set_num_threads(1)
    result: dict[str, float] = {"rows": given.rows, "width": given.width}
    for dtype, word in ((torch.float32, "float32"), (torch.float64, "float64")):
        found = measure(given.rows, given.width, given.rounds, dtype)
        result |= {f"{word}_{name}": value for name, value in found.items()}
    answer("advantages", result, smoke=given.smoke)


if __name__ == "__main__":
    main()
