"""Sizes of models that are not here, and whether the recipes fit the hardware that their heads name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.placement import placement_of
from asyncrl.config import config_dir, load_config
from asyncrl.memory.fit import taken
from asyncrl.memory.nominal import billions_in, billions_of, header_gpus, header_settings, nominal_model
from asyncrl.memory.usage import engine_bytes
from asyncrl.placement import WHOLE_SHARE
from asyncrl.schema import Config

RECIPES = [path for path in sorted((config_dir() / "experiment").glob("*.yaml")) if header_gpus(path)]


@pytest.mark.parametrize(
    ("size", "parameters"),
    [(0.5, 0.494e9), (1.5, 1.544e9), (3, 3.086e9), (4, 4.022e9), (7, 7.616e9), (8, 8.191e9), (14, 14.77e9),
     (32, 32.76e9), (72, 72.71e9)],
)  # fmt: skip
def test_a_published_size_has_the_published_number_of_parameters(size: float, parameters: float) -> None:
    assert nominal_model(size).parameters == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize("size", [1, 1.7, 10, 24, 100])
def test_any_other_size_has_about_that_many_parameters(size: float) -> None:
    assert nominal_model(size).parameters == pytest.approx(size * 1e9, rel=0.35)


def test_a_size_is_read_from_a_word_and_from_the_name_of_a_model() -> None:
    assert [billions_of(text) for text in ("7b", "0.5B", "135m", "hf_bf16", "b", "7")] == [7, 0.5, 0.135, *[None] * 3]
    names = ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-4B-Instruct-2507", "YOUR-7B-SFT-MODEL", "SmolLM2-135M", "gpt2")
    assert [billions_in(name) for name in names] == [1.5, 4, 7, 0.135, None]


def recipe(path: Path) -> tuple[Config, int]:
    gpus, settings = header_gpus(path), header_settings(path)
    given = [f"{key}={value}" for key, value in settings.items()]
    config = load_config([f"experiment={path.stem}", f"placement.gpus={gpus}", *given])
    return with_dtypes(config, learner="cuda", engine="cuda"), gpus


@pytest.mark.parametrize("gpu_gb", [80, 141])
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_fits_the_gpus_that_its_head_names(path: Path, gpu_gb: int) -> None:
    config, gpus = recipe(path)
    billions = billions_in(config.model.path)
    assert billions, "its head names a model of a size"
    sizes = {name: billions_in(name) for name in (config.critic.path, config.reference.path) if name}
    others = {name: nominal_model(size) for name, size in sizes.items() if size}
    model = replace(nominal_model(billions), others=others)
    placement = placement_of(config, gpus)
    assert len(placement.learner) == config.learner.ranks
    room = min((rank.memory for rank in placement.learner), default=WHOLE_SHARE) * gpu_gb * 1e9
    assert taken(config, model, int(room)) <= room
    an_engine = placement.engine_memory * gpu_gb * 1e9 * config.engine.tensor_parallel
    assert engine_bytes(config, model) <= an_engine


def test_the_recipes_for_gpus_are_all_looked_at() -> None:
    names = {path.stem for path in RECIPES}
    assert {"dapo_math_17k", "gsm8k_grpo", "gsm8k_ppo_critic", "retool", "search_r1", "verifiers"} <= names
    for path in (config_dir() / "experiment").glob("*.yaml"):
        on_gpus = "device: cuda" in path.read_text()
        assert not on_gpus or path.stem in names | {"gpu_example"}, f"{path.name} names no GPUs for its model"
