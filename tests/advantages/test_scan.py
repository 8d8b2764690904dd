"""The recurrence behind every trace, against a loop."""

from __future__ import annotations

import pytest
import torch

from asyncrl.advantages import gae, retrace, vtrace
from asyncrl.advantages.scan import Stream, scan


def by_a_loop(terms: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    x = torch.zeros_like(terms)
    after = terms.new_zeros(())
    for t in range(len(terms) - 1, -1, -1):
        after = x[t] = terms[t] + factors[t] * after
    return x


@pytest.mark.parametrize("length", [0, 1, 2, 127, 128, 129, 160, 161, 1000, 4096, 5000])
@pytest.mark.parametrize("kind", ["number", "sequences", "tokens", "tiny and zero", "above 1"])
def test_a_scan_is_the_loop_over_tokens(length: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(length)
    terms, drawn = torch.randn(2, length, generator=generator, dtype=torch.float64)
    factors = {
        "number": torch.full_like(drawn, 0.97),
        "sequences": torch.where(torch.arange(length) % 37 == 36, 0.0, 1.0).double(),
        "tokens": 1.2 * drawn.abs(),
        "tiny and zero": torch.where(drawn < 0, 0.0, drawn * 1e-160),
        "above 1": 1.0 + 0.01 * drawn.abs(),
    }[kind]
    before = terms.clone(), factors.clone()
    torch.testing.assert_close(scan(terms, factors), by_a_loop(terms, factors), rtol=1e-12, atol=1e-12)
    assert torch.equal(terms, before[0]) and torch.equal(factors, before[1])


def test_a_stream_is_the_sampled_tokens_in_order_and_goes_back_to_their_places() -> None:
    mask = torch.tensor([[False, True, False, True], [True, True, True, False], [False] * 4, [True] * 4])
    table = torch.arange(16.0).view(4, 4)
    table[0, 0] = float("nan")
    stream = Stream.of(mask)
    taken = stream.take(table)
    assert taken.tolist() == [1.0, 3.0, 4.0, 5.0, 6.0, 12.0, 13.0, 14.0, 15.0]
    assert stream.following(taken).tolist() == [3.0, 0.0, 5.0, 6.0, 0.0, 13.0, 14.0, 15.0, 0.0]
    assert stream.factors(0.5, taken).tolist() == [0.5, 0.0, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.0]
    each = stream.factors(torch.tensor([1.0, 2.0, 3.0, 4.0]), taken)
    assert each.tolist() == [1.0, 0.0, 2.0, 2.0, 0.0, 4.0, 4.0, 4.0, 0.0]
    back = torch.full_like(table, 9.0)
    stream.put(taken, back)
    assert torch.equal(back, torch.where(mask, table, 0.0))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)])
def test_without_a_sampled_token_all_is_0(shape: tuple[int, int]) -> None:
    nothing = torch.full(shape, float("nan"))
    advantages, returns = gae(nothing, nothing, torch.zeros(shape, dtype=torch.bool))
    assert torch.equal(advantages, torch.zeros(shape)) and torch.equal(returns, torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_have_the_dtype_of_the_values_and_do_not_change_what_is_given(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values, log_ratio = (torch.randn(3, 200, generator=generator).to(dtype) for _ in range(3))
    mask = torch.ones(3, 200, dtype=torch.bool)
    before = rewards.clone(), values.clone(), log_ratio.clone()
    for estimate in (vtrace, retrace):
        found = estimate(rewards, values, log_ratio, mask, 0.9, 0.8)
        right = estimate(rewards.double(), values.double(), log_ratio.double(), mask, 0.9, 0.8)
        for got, expected in zip(found, right, strict=True):
            assert got.dtype == dtype
            largest_error = 30 * torch.finfo(dtype).eps * float(expected.abs().max())
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=largest_error)
    assert all(map(torch.equal, (rewards, values, log_ratio), before))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("length", [20, 300])
def test_what_is_not_finite_stays_in_its_sequence(bad: float, length: int) -> None:
    generator = torch.Generator().manual_seed(2)
    rewards, values, log_ratio = torch.randn(3, 4, length, generator=generator, dtype=torch.float64)
    mask = torch.ones(4, length, dtype=torch.bool)
    broken = values.clone()
    broken[2, 1] = bad
    others = [0, 1, 3]
    for estimate in (vtrace, retrace):
        found = estimate(rewards, broken, log_ratio, mask, 0.9, 0.8)
        right = estimate(rewards, values, log_ratio, mask, 0.9, 0.8)
        for got, expected in zip(found, right, strict=True):
            torch.testing.assert_close(got[others], expected[others], rtol=1e-12, atol=1e-12)
            assert not got[2].isfinite().all()


def test_tables_of_many_rows_are_cut_and_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    r, v, log_ratio = (torch.randn(7, 40, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(7, 40, generator=generator) < 0.7
    lam = torch.rand(7, generator=generator, dtype=torch.float64)
    whole = [*gae(r, v, mask, 0.9, lam), *retrace(r, v, log_ratio, mask, 0.9, lam)]
    monkeypatch.setattr("asyncrl.advantages.scan.SLOTS", 80)
    cut = [*gae(r, v, mask, 0.9, lam), *retrace(r, v, log_ratio, mask, 0.9, lam)]
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
