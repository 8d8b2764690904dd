from __future__ import annotations

from pathlib import Path

from asyncrl import advantages
from asyncrl.advantages.catalogue import ESTIMATORS, with_table
from asyncrl.config import config_dir

HELPERS = {
    *("kl_in_reward", "length_adaptive_lambda", "masked_whiten", "returns_to_go", "reward_components"),
    *("segment_log_ratio", "token_rewards", "whitening_moments", "BASELINES", "STDS", "WHITENINGS"),
}


def test_every_estimator_is_in_the_table_and_every_row_names_one() -> None:
    assert {row.function for row in ESTIMATORS} == set(advantages.__all__) - HELPERS


def test_every_setting_that_a_row_names_exists_and_every_one_that_exists_has_a_row() -> None:
    shipped = {path.stem for path in (config_dir() / "advantage").glob("*.yaml")}
    named = {word.split("=")[1] for row in ESTIMATORS for word in row.setting.replace("`", "").split() if "adv" in word}
    assert named == shipped


def test_the_table_in_the_documentation_is_the_current_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    assert page == with_table(page), "run python -m asyncrl.advantages.catalogue"
