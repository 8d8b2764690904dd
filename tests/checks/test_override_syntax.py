"""Values are parsed as the grammar of overrides parses them."""

from __future__ import annotations

import pytest

from asyncrl.checks.override_syntax import quoted
from asyncrl.config import load_config

REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:f"]


@pytest.mark.parametrize(
    "path", ["/a/b.c-d_e", "/a b", "/a,b", "/it's", "/x(1)[2]{3}", "/a=b", "/back\\slash", "/$HOME"]
)
def test_a_quoted_path_survives_the_override_grammar(path: str) -> None:
    assert load_config([*REQUIRED, f"run.dir={quoted(path)}"]).run.dir == path
