"""The table of advantage estimators in docs/losses.md."""

from __future__ import annotations

from pathlib import Path

from asyncrl import advantages
from asyncrl.config import config_dir

HELPERS = {
    *("length_adaptive_lambda", "masked_whiten", "returns_to_go", "reward_components"),
    *("segment_log_ratio", "token_rewards", "whitening_moments", "BASELINES", "STDS", "WHITENINGS"),
}


def rows() -> list[list[str]]:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    lines = page.partition("## Advantages")[2].partition("\n\nA sample")[0].splitlines()
    return [line[2:-2].split(" | ") for line in lines if line.startswith("| ")][1:]


def test_every_estimator_is_in_the_table_and_every_row_names_one() -> None:
    assert {row[1].strip("`") for row in rows()} == set(advantages.__all__) - HELPERS
    assert {len(row) for row in rows()} == {8}


def test_every_setting_that_a_row_names_exists_and_every_one_that_exists_has_a_row() -> None:
    shipped = {path.stem for path in (config_dir() / "advantage").glob("*.yaml")}
    named = {word.split("=")[1] for row in rows() for word in row[6].replace("`", "").split() if "adv" in word}
    assert named == shipped
