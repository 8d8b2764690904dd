"""Rank 0 works alone, for longer than the other ranks could wait in one go."""

from __future__ import annotations

import threading

import pytest
import torch

from asyncrl.learner.parallel import collectives

CPU = torch.device("cpu")


def test_the_others_are_met_again_and_again_while_rank_zero_works(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[float] = []
    enough = threading.Event()

    def meet(values: torch.Tensor, device: torch.device, group: object) -> torch.Tensor:
        met.append(values.item())
        if len(met) == 3:
            enough.set()
        return values

    monkeypatch.setattr(collectives, "MEET_EVERY_S", 0.01)
    monkeypatch.setattr(collectives, "sum_over_ranks", meet)
    assert collectives.however_long(lambda: enough.wait(120), CPU) is True
    assert met[:3] == [1.0] * 3 and met[-1] == 0.0


def test_a_rank_that_is_done_stays_until_rank_zero_is(monkeypatch: pytest.MonkeyPatch) -> None:
    others = iter([1.0, 1.0, 0.0])
    monkeypatch.setattr(collectives, "sum_over_ranks", lambda values, device, group: values + next(others))
    assert collectives.however_long(tuple, CPU) == ()
    assert next(others, None) is None


def test_what_goes_wrong_on_rank_zero_is_raised_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MEET_EVERY_S", 0.01)
    with pytest.raises(ZeroDivisionError):
        collectives.however_long(lambda: 1 // 0, CPU)
