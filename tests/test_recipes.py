"""The recipes of configs/experiment/ and their smoke variants, composed and planned completely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from asyncrl.cli.main import main
from asyncrl.config import config_dir, load_config
from asyncrl.quickstart import smoke
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer

VARIANTS = sorted(file.stem for file in config_dir().glob("experiment/smoke/*.yaml") if file.stem != "small")
SLOW = {"verifiers", "reasoning_gym_mix"}
"""Planning these imports their packages; making rows of the second, too."""

KINDS = {"classifier": {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "reward"}}}
"""What the configs of the models say beside their type."""

NAMED = {"verifiers": ["environment.args.taskset=numbers_v1", "model.renderer=default"]}
"""Settings that a recipe leaves to the user, beside its files."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where rows are made, each variant's once: of some it takes processes."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def fake_models(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that pass for models until a process loads them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNCRL_CACHE", str(cache))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    folder = tmp_path / "models"
    for name in ("model", "caller", "teacher", "classifier"):
        save_byte_tokenizer(folder / name)
        (folder / name / "config.json").write_text(json.dumps({"model_type": "qwen2"} | KINDS.get(name, {})))
        (folder / name / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    monkeypatch.setattr(smoke, "prepared_models", lambda: folder)
    return folder


def test_every_recipe_has_a_smoke_variant_that_has_what_it_needs() -> None:
    assert sorted(smoke.SMOKES) == VARIANTS
    for name in VARIANTS:
        assert (config_dir() / "experiment" / f"{name}.yaml").is_file()


@pytest.mark.parametrize("file", sorted(config_dir().glob("experiment/*.yaml")), ids=lambda file: file.stem)
def test_a_recipe_for_gpus_samples_with_vllm(file: Path) -> None:
    """The built-in engine decodes without CUDA graphs."""
    recipe = yaml.safe_load(file.read_text())
    if recipe.get("learner", {}).get("device") == "cuda":
        assert {"override /engine": "vllm"} in recipe["defaults"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.unhurried] if name in SLOW else ()) for name in VARIANTS],
)
def test_a_recipe_and_its_smoke_variant_can_be_planned_with_rows_of_its_data_set(
    name: str, fake_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["local", f"experiment=smoke/{name}", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "engine transformers on cpu" in plan and "all of a form that can be used" in plan
    *paths, own, _ = smoke.filled([f"experiment=smoke/{name}"])
    assert own == "overwrite=true"
    assert main(["local", *paths, *NAMED.get(name, []), f"experiment={name}", "--dry-run"]) == 0
    assert "engine vllm on cuda" in capsys.readouterr().out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.unhurried] if name == "reasoning_gym_mix" else ())
        for name in VARIANTS
    ],
)
def test_a_smoke_variant_changes_sizes_and_places_and_nothing_of_what_is_learned(name: str, fake_models: Path) -> None:
    *paths, _, _ = smoke.filled([f"experiment=smoke/{name}"])
    small, whole = (load_config([*paths, f"experiment={each}"]) for each in (f"smoke/{name}", name))
    assert small.loss == whole.loss and small.advantage == whole.advantage and small.reference == whole.reference
    assert small.environment.name == whole.environment.name
    assert small.reward.function == whole.reward.function and small.reward.metric == whole.reward.metric
    assert set(small.reward.functions) == set(whole.reward.functions)
    assert set(small.eval.sets) == set(whole.eval.sets)
    assert small.run.name == f"smoke-{whole.run.name}" == f"smoke-{name}"


def test_what_the_user_types_wins_over_what_a_variant_is_given(fake_models: Path) -> None:
    given = smoke.filled(["experiment=smoke/gsm8k_grpo", "data.path=mine.jsonl", "run.name=mine"])
    assert "overwrite=true" not in given
    assert load_config(given).data.path == "mine.jsonl"
    assert load_config(given).model.path == str(fake_models / "model")


def test_a_variant_that_is_none_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "experiment=smoke/gsm8k_grop", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "`experiment=smoke/gsm8k_grop`: there is no such choice" in said
    assert "Did you mean `smoke/gsm8k_grpo`" in said and "smoke/retool" in said
