"""Costs of a model that nobody has measured, by arithmetic: a first plan before the first run."""

from __future__ import annotations

from dataclasses import dataclass

FLOPS, BANDWIDTH = 989e12, 3.35e12
"""Published dense bf16 operations and bytes of memory per second of an H100 SXM."""
TRAINED, COMPUTED, READ = 0.35, 0.4, 0.6
"""Shares of these that are assumed: of the operations in training and in decoding, and of the bandwidth in decoding."""
STEP_S = 0.004
"""Seconds of an engine's step beside its arithmetic, assumed."""
WIRE = 25e9
"""Bytes per second at which weights are sent, assumed."""
BATCHES = (1, 8, 32, 128, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    parameters: int
    kv_values_per_token: int
    length: float
    """Mean tokens of a completion."""
    prompt: float
    """Mean tokens of a prompt."""
    tensor_parallel: int
    """GPUs of an engine."""
    recomputed: bool
    """Whether the learner recomputes activations."""


def estimated_costs(work: Workload) -> dict[str, str]:
    """Return costs by their names in `cost.NAME=VALUE`.

    Decoding reads all weights and the keys and values of the running sequences once per step, or computes 2 operations
    per parameter and sequence, whichever takes longer. Training takes 6 operations per parameter and token, 8 if
    activations are recomputed; prompts are counted as tokens of their own for each completion.
    """
    rates = []
    for batch in BATCHES:
        context = work.prompt + work.length / 2
        read = 2 * (work.parameters + batch * context * work.kv_values_per_token)
        by_reading = read / (READ * BANDWIDTH * work.tensor_parallel)
        by_computing = 2 * work.parameters * batch / (COMPUTED * FLOPS * work.tensor_parallel)
        rates.append(f"{batch}:{batch / (max(by_reading, by_computing) + STEP_S):.6g}")
    operations = (8 if work.recomputed else 6) * work.parameters * (work.prompt + work.length) / work.length
    return {
        "tokens_per_s": ",".join(rates),
        "length_mean": f"{work.length:.6g}",
        "train_tokens_per_s": f"{TRAINED * FLOPS / operations:.6g}",
        "sync_s": f"{2 * work.parameters / WIRE:.6g}",
    }


def assumed(work: Workload, given: bool) -> str:
    """Say on what the costs rest.

    Args:
        given: whether the length of completions was given.
    """
    lengths = "" if given else f"; completions of half of rollout.max_new_tokens, {work.length:,.0f} tokens"
    return (
        f"estimated, not measured: {work.parameters / 1e9:.2f} billion parameters, GPUs of {FLOPS / 1e12:.0f} TFLOP/s "
        f"and {BANDWIDTH / 1e12:.2f} TB/s, trained at {TRAINED:.0%} of it and decoded at {READ:.0%} of the bandwidth"
        f"{lengths}. Give cost.NAME=VALUE, or measure a short run: --from RUN"
    )
