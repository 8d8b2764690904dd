from __future__ import annotations

import pytest

from asyncrl.cli.lengths import histogram


@pytest.mark.parametrize("tokens", [[5], [5, 5, 5], [1, 2], list(range(100)), [50, 60], [9, 9, 200]])
def test_every_length_is_in_one_bin_of_the_histogram(tokens: list[int]) -> None:
    lines = histogram(tokens, limit=40)[1:]
    assert sum(int(line.split()[-1].replace(",", "")) for line in lines) == len(tokens)
