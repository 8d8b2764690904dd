"""Truncated sampling: the learner's log-probs over the support that each token was drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.engines.hf import truncation
from asyncrl.engines.hf.truncation import Truncation, supports, written
from asyncrl.learner import memory_plan
from asyncrl.learner.batch.support import support_of
from asyncrl.learner.model.logprobs import token_logprobs
from asyncrl.types import SUPPORT_COUNTS, Trajectory

CPU = torch.device("cpu")
WHOLE, FEW, MANY = 0, 5, 60
"""Tokens of a support: all, some that are written as ids, and so many that they are written as bits."""


def reference(
    hidden: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, targets: np.ndarray, inside: np.ndarray,
    temperature: float, scale: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """By hand in float64: log-probs, entropies, and the gradients of sum(scale * log-probs)."""
    logits = (hidden @ weight.T + (0.0 if bias is None else bias)) / temperature
    exp = np.where(inside, np.exp(logits), 0.0)
    probs = exp / exp.sum(1, keepdims=True)
    rows = np.arange(len(targets))
    logs = np.log(np.where(inside, probs, 1.0))
    d_logits = -probs * scale[:, None]
    d_logits[rows, targets] += scale
    d_logits /= temperature
    return logs[rows, targets], -(probs * logs).sum(1), d_logits @ weight, d_logits.T @ hidden, d_logits.sum(0)


def drawn(sizes: list[int], vocabulary: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, Trajectory]:
    """Which tokens each is drawn from [N, V], the tokens [N], and both as a trajectory brings them."""
    rng = np.random.default_rng(seed)
    inside = np.zeros((len(sizes), vocabulary), bool)
    for row, size in enumerate(sizes):
        inside[row, rng.choice(vocabulary, size or vocabulary, replace=False)] = True
    tokens = np.array([rng.choice(np.flatnonzero(row)) for row in inside], np.int32)
    pieces = written(torch.from_numpy(inside))
    count = len(sizes)
    trajectory = Trajectory(
        token_ids=np.concatenate([np.zeros(1, np.int32), tokens]),
        loss_mask=np.arange(count + 1) > 0,
        behavior_logprobs=np.zeros(count + 1, np.float32),
        policy_versions=np.zeros(count + 1, np.int32),
        reward=0.0,
        extras={name: np.concatenate(each) for name, each in pieces.items()},
    )
    return inside, tokens, trajectory


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logprobs_over_a_support_are_exact_in_value_and_gradient(
    monkeypatch: pytest.MonkeyPatch, temperature: float, with_bias: bool
) -> None:
    """Chunks of 3 tokens: supports of a chunk begin anywhere among the ids and the rows of bits."""
    monkeypatch.setattr(memory_plan, "HEAD_MIN_ROWS", 3)
    monkeypatch.setattr(memory_plan, "HEAD_ELEMENTS", 3)
    sizes = [FEW, WHOLE, MANY, MANY, FEW, 1, FEW, WHOLE, MANY, 1, 1]
    inside, tokens, trajectory = drawn(sizes, vocabulary=203)
    assert (np.sign(trajectory.extras[SUPPORT_COUNTS]) == [(s == 0) - 1 if s == MANY else s > 0 for s in sizes]).all()
    rng = np.random.default_rng(1)
    hidden, weight, bias = rng.normal(size=(11, 16)), rng.normal(size=(203, 16)), rng.normal(size=203)
    scale = rng.normal(size=11)
    exact: Any = {"dtype": torch.float64, "requires_grad": True}
    inputs = [torch.tensor(array, **exact) for array in (hidden, weight, *([bias] if with_bias else []))]
    given = (inputs[0], inputs[1], inputs[2] if with_bias else None)
    support = support_of([trajectory], np.arange(11), CPU)
    values, entropy = token_logprobs(*given, torch.from_numpy(tokens).long(), temperature, support)
    gradients = torch.autograd.grad((values * torch.from_numpy(scale)).sum(), inputs)
    expected = reference(hidden, weight, bias if with_bias else None, tokens, inside, temperature, scale)
    for mine, theirs in zip((values, entropy, *gradients), expected, strict=False):
        np.testing.assert_allclose(mine.detach().numpy(), theirs, atol=1e-12, rtol=1e-12)


def test_supports_are_picked_out_for_any_tokens_of_several_trajectories() -> None:
    """Some tokens are over-age and one trajectory was drawn from the whole vocabulary."""
    first, _, one = drawn([MANY, FEW, MANY, WHOLE, FEW], 203, seed=1)
    second, _, two = drawn([FEW, MANY], 203, seed=2)
    whole = Trajectory(
        token_ids=np.zeros(4, np.int32),
        loss_mask=np.array([False, True, False, True]),
        behavior_logprobs=np.zeros(4, np.float32),
        policy_versions=np.zeros(4, np.int32),
        reward=0.0,
    )
    rows = np.array([8, 2, 1, 3, 5, 7, 0])
    expected = np.concatenate([first, np.ones((2, 203), bool), second])[rows]
    support = support_of([one, whole, two], rows, CPU)
    assert support is not None
    parts = [support.narrow(torch.zeros(len(expected[part]), 203), part) for part in (slice(0, 3), slice(3, 7))]
    np.testing.assert_array_equal((torch.cat(parts) == 0).numpy(), expected)
    some = np.array([1, 3, 4, 6])  # as a rank that shares the sequences has of them
    mine = support.of(torch.from_numpy(some)).narrow(torch.zeros(4, 203), slice(0, 4))
    np.testing.assert_array_equal((mine == 0).numpy(), expected[some])
    assert support_of([whole], np.arange(2), CPU) is None
    np.testing.assert_array_equal(support.drawn_from, [MANY, MANY, FEW, FEW, MANY])


def truncated(probs: np.ndarray, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """One row, token by token."""
    kept = [token for token in range(len(probs)) if probs[token] >= min_p * probs.max()]
    kept = sorted(kept, key=lambda token: (-probs[token], token))
    kept = kept[: top_k or len(kept)]
    whole, mass, chosen = sum(probs[token] for token in kept), 0.0, []
    for token in kept:
        if top_p < 1 and chosen and mass >= top_p * whole:
            break
        chosen.append(token)
        mass += probs[token]
    inside = np.zeros(len(probs), bool)
    inside[chosen] = True
    return inside


@pytest.mark.parametrize("candidates", [1024, 40], ids=["sorted whole", "the likeliest first"])
@pytest.mark.parametrize("levels", [0, 30], ids=["distinct", "ties"])
def test_supports_are_min_p_then_top_k_then_top_p_of_each_row_alone(
    monkeypatch: pytest.MonkeyPatch, candidates: int, levels: int
) -> None:
    """Of 300 tokens; supports are larger and smaller than the candidates, and end among equals."""
    monkeypatch.setattr(truncation, "CANDIDATES", candidates)
    rng = np.random.default_rng(3)
    cases = [(1, 0, 0), (0.9, 0, 0), (1, 7, 0), (1, 0, 0.1), (0.7, 9, 0.02), (1e-9, 0, 0), (1, 500, 0), (0.3, 2, 0.5)]
    cases += [(0.2, 0, 1e-4), (0.97, 0, 1e-5), (0.5, 100, 0), (1, 40, 0), (1, 39, 0), (1, 41, 0), (0.999, 0, 0)]
    logits = rng.normal(size=(len(cases), 300)) * 3
    logits = np.round(logits * levels / 10) * 10 / levels if levels else logits
    columns = torch.tensor(cases, dtype=torch.float32).T
    given = Truncation(top_p=columns[0], top_k=columns[1], min_p=columns[2])
    found = supports(torch.from_numpy(logits), given).numpy()
    for row, (inside, (top_p, top_k, min_p)) in enumerate(zip(found, cases, strict=True)):
        probs = np.exp(logits[row]) / np.exp(logits[row]).sum()
        wanted = truncated(probs, float(np.float32(top_p)), top_k, float(np.float32(min_p)))
        np.testing.assert_array_equal(inside, wanted, err_msg=str(cases[row]))
    assert found[0].all() and found[6].all() and found[5].sum() == 1


def test_a_support_is_in_as_many_bytes_as_it_needs() -> None:
    vocabulary = 50_000
    few, many, whole = (np.arange(vocabulary) < size for size in (20, 20_000, vocabulary))
    pieces = written(torch.from_numpy(np.stack([few, many, whole])))
    sizes = [sum(array[row].nbytes for array in pieces.values()) for row in range(3)]
    assert sizes == [4 + 80, 4 + 6250, 4]
