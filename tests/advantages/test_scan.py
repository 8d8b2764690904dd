"""The recurrence behind every trace, against a loop."""

from __future__ import annotations

import pytest
import torch

from asyncrl.advantages import gae, retrace
from asyncrl.advantages.scan import Columns, following, scan


def by_a_loop(terms: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    x = torch.zeros_like(terms)
    after = terms.new_zeros(terms.shape[1])
    for t in range(len(terms) - 1, -1, -1):
        after = x[t] = terms[t] + factors[t] * after
    return x


@pytest.mark.parametrize("length", [0, 1, 2, 3, 15, 16, 17, 100, 1000])
@pytest.mark.parametrize("kind", ["number", "sequence", "token", "with zeros"])
def test_a_scan_is_the_loop_over_tokens(length: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(length)
    terms = torch.randn(length, 3, generator=generator, dtype=torch.float64)
    tokens = 1.2 * torch.rand(length, 3, generator=generator, dtype=torch.float64)
    factors: dict[str, float | torch.Tensor] = {
        "number": 0.97,
        "sequence": torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64),
        "token": tokens,
        "with zeros": torch.where(tokens < 0.3, 0.0, tokens * 1e-9),
    }
    each = factors[kind]
    before = terms.clone()
    expected = by_a_loop(terms, torch.as_tensor(each, dtype=torch.float64).expand(length, 3))
    torch.testing.assert_close(scan(terms, each), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(terms, before)


def test_columns_are_the_sampled_tokens_in_order_and_go_back_to_their_places() -> None:
    mask = torch.tensor([[False, True, False, True], [True, True, True, False], [False, False, False, False]])
    table = torch.arange(12.0).view(3, 4)
    table[0, 0] = float("nan")
    columns = Columns.of(mask)
    taken = columns.take(table)
    assert taken.tolist() == [[1.0, 4.0, 0.0], [3.0, 5.0, 0.0], [0.0, 6.0, 0.0]]
    assert following(taken).tolist() == [[3.0, 5.0, 0.0], [0.0, 6.0, 0.0], [0.0, 0.0, 0.0]]
    back = torch.full_like(table, 9.0)
    columns.put(taken, back)
    assert torch.equal(back, torch.where(mask, table, 0.0))


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
