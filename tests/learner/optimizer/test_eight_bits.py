"""Moments in 8 bits, against float64 arithmetic of numpy that knows nothing of the codes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from asyncrl.errors import ConfigError
from asyncrl.learner.memory_plan import BLOCK, held
from asyncrl.learner.optimizer import eight_bits
from asyncrl.learner.optimizer.eight_bits import check_blocks, dequantise, levels, quantise
from asyncrl.learner.optimizer.update import make_optimizer
from asyncrl.schema import LearnerConfig

CPU = torch.device("cpu")
Numbers = NDArray[np.float64]


def spacing(signed: bool) -> tuple[Numbers, Numbers]:
    """Of arXiv 2110.02861, section 1.3: the levels, made another way than ours, and how far each is from the next."""
    found = {0.0, 1.0}
    for zeros in range(7):
        shares = 2 ** (6 - zeros + (not signed))
        for share in range(shares):
            level = (0.1 + 0.9 * (share + 0.5) / shares) * 10.0**-zeros
            found |= {level, -level} if signed else {level}
    every = np.array(sorted(found))
    assert len(every) == 256
    return every, np.diff(every)


@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_those_of_dynamic_quantisation(signed: bool):
    every, _ = spacing(signed)
    np.testing.assert_allclose(levels(signed, CPU).numpy(), every, rtol=1e-6, atol=0)


def nearest(shares: Numbers, signed: bool) -> Numbers:
    """Distance from the nearest level to each of them."""
    every, _ = spacing(signed)
    return np.abs(shares[..., None] - every).min(-1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), signed=st.booleans(), spread=st.floats(0.0, 3.0))
def test_a_moment_becomes_its_nearest_level_of_its_block(seed: int, signed: bool, spread: float):
    rng = np.random.default_rng(seed)
    moment = rng.normal(size=(3, 2 * BLOCK)) * 10.0 ** rng.normal(scale=spread, size=(3, 2 * BLOCK))
    moment = moment.astype(np.float32) if signed else np.square(moment).astype(np.float32)
    codes, scales = quantise(torch.from_numpy(moment), signed=signed)
    back = dequantise(codes, scales, signed=signed).numpy().astype(np.float64)
    largest = np.abs(moment).astype(np.float64).reshape(3, 2, BLOCK).max(-1)
    np.testing.assert_array_equal(scales.numpy(), largest)
    largest = largest.repeat(BLOCK, -1)
    shares = moment / largest
    off = np.abs(back - moment) / largest
    if signed:
        assert (off <= nearest(shares, signed) + 1e-6 * np.abs(shares)).all()
    else:
        least = spacing(signed)[0][1]
        above = shares >= least
        assert (off[above] <= nearest(shares[above], signed) + 1e-6 * shares[above]).all()
        np.testing.assert_allclose((back / largest)[~above & (shares > 0)], least, rtol=1e-6)
    assert ((back == 0) | (np.sign(back) == np.sign(moment))).all()


def test_nothing_is_nothing_and_a_second_moment_above_it_stays_above():
    for signed in (True, False):
        codes, scales = quantise(torch.zeros(2, BLOCK), signed=signed)
        assert dequantise(codes, scales, signed=signed).eq(0).all()
    squares = torch.zeros(1, BLOCK)
    squares[0, 0], squares[0, 1] = 1.0, 1e-30
    back = dequantise(*quantise(squares, signed=False), signed=False)
    assert back[0, 0] == 1.0 and 0 < back[0, 1] < 1e-6 and back[0, 2:].eq(0).all()


def train(optimizer_name: str, steps: int, *, offload: str = "none") -> tuple[list[float], torch.optim.Optimizer]:
    """Losses of a small network on a task that it can learn."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
    inputs = torch.randn(256, 32, generator=generator)
    targets = (inputs @ torch.randn(32, 8, generator=generator) / 6).tanh()
    config = LearnerConfig(lr=3e-3, optimizer=optimizer_name, offload=offload)
    optimizer = make_optimizer(network.parameters(), config)
    losses = []
    for step in range(steps):
        rows = slice(32 * (step % 8), 32 * (step % 8) + 32)
        loss = (network(inputs[rows]) - targets[rows]).square().mean()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = config.lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def test_a_network_learns_as_with_moments_in_fp32():
    (whole, _), (coarse, _) = train("adamw", 160), train("adamw_8bit", 160)
    first, last = np.mean(whole[:8]), np.mean(whole[-8:])
    assert last < first / 5
    assert abs(np.mean(coarse[-8:]) - last) < 0.2 * last


def test_each_step_is_adamw_of_the_moments_that_were_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eight_bits, "CHUNK", 3 * 64)  # in several goes, the last one shorter
    generator = torch.Generator().manual_seed(3)
    matrix, bias = (nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((10, 64), (64,)))
    config = LearnerConfig(lr=0.01, weight_decay=0.1, optimizer="adamw_8bit")
    optimizer = make_optimizer([matrix, bias], config)
    reference = {key: np.zeros(each.shape) for key, each in (("matrix", matrix), ("bias", bias))}
    moments = {key: (each.copy(), each.copy()) for key, each in reference.items()}
    for count in range(1, 6):
        for key, parameter in (("matrix", matrix), ("bias", bias)):
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (-count)
            first, second = moments[key]
            gradient, before = parameter.grad.double().numpy(), parameter.detach().double().numpy()
            first = config.beta1 * first + (1 - config.beta1) * gradient
            second = config.beta2 * second + (1 - config.beta2) * gradient**2
            decayed = before * (1 - config.lr * config.weight_decay * (key == "matrix"))
            corrected = np.sqrt(second / (1 - config.beta2**count)) + config.adam_eps
            reference[key] = decayed - config.lr * first / (1 - config.beta1**count) / corrected
            moments[key] = first, second
        optimizer.step()
        for key, parameter in (("matrix", matrix), ("bias", bias)):
            np.testing.assert_allclose(parameter.detach().numpy(), reference[key], rtol=1e-5, atol=1e-6)
        kept = optimizer.state[matrix]
        assert kept["step"].item() == optimizer.state[bias]["step"].item() == count
        for name, moment, signed in zip(("exp_avg", "exp_avg_sq"), moments["matrix"], (True, False), strict=True):
            back = dequantise(kept[name], kept[name + "_scale"], signed=signed).double().numpy()
            within_half_a_spacing(back, moment, signed)
        # What the next step begins with is what was kept.
        one, two = (
            dequantise(kept[name], kept[f"{name}_scale"], signed=signed).double().numpy()
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
        )
        moments["matrix"] = one, two
        np.testing.assert_allclose(optimizer.state[bias]["exp_avg"].numpy(), moments["bias"][0], rtol=1e-4, atol=1e-7)


def within_half_a_spacing(kept: Numbers, moment: Numbers, signed: bool) -> None:
    """Of the levels around it; a second moment below the least one is that."""
    largest = np.abs(moment).reshape(len(moment), -1, BLOCK).max(-1).repeat(BLOCK, -1)
    every, gaps = spacing(signed)
    place = np.clip(np.searchsorted(every, moment / largest) - 1, 0, len(gaps) - 1)
    allowed = gaps[place] * (0.5 if signed else 1.0) * 1.001
    below = moment / largest < every[0]  # -1 is no level
    allowed[below] = every[0] + 1.001
    assert (np.abs(kept - moment) <= allowed * largest).all()


def test_what_it_holds_is_what_is_planned_to_the_byte():
    shapes = [(64, 96), (7, 32), (3, 5, 64), (4, 40), (64,), (2, 8)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = make_optimizer(parameters, LearnerConfig(optimizer="adamw_8bit"))
    live = sum(each.nbytes for kept in optimizer.state.values() for each in kept.values())
    assert live == held(shapes, 1, optimizer="adamw_8bit").optimizer
    rows = 64 * 96 + 7 * 32 + 3 * 5 * 64
    assert live == rows * 2.25 + 8 * (4 * 40 + 64 + 16) + 4 * len(shapes)


def test_a_rank_that_would_have_a_part_of_a_block_is_refused(monkeypatch: pytest.MonkeyPatch):
    whole = nn.Parameter(torch.zeros(4, 64))
    check_blocks([whole, nn.Parameter(torch.zeros(4, 24))])
    monkeypatch.setattr(eight_bits, "local", lambda tensor: tensor[:, :16])
    with pytest.raises(ConfigError, match="cuts rows of 64 into parts of 16, which is not a multiple of 32"):
        check_blocks([whole])
