from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.config import load_config, read_config
from asyncrl.digests import learner_digest, run_digest
from asyncrl.telemetry.folder.origins import origins
from asyncrl.telemetry.folder.resumed import kept_dtypes
from asyncrl.telemetry.folder.run_folder import begin_settings, changes_in, config_note, prepare_run_folder

REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:f"]


def dtypes(*overrides: str, **devices: str) -> tuple[str, str, str]:
    """Of model, wire and engine."""
    config = with_dtypes(load_config([*REQUIRED, *overrides]), **devices)
    return config.model.dtype, config.weights.wire_dtype, config.engine.dtype


@pytest.mark.parametrize(
    ("overrides", "learner", "engine", "found"),
    [
        ([], "cpu", "cpu", ("float32", "float32", "float32")),
        ([], "cuda", "cuda", ("bfloat16", "bfloat16", "bfloat16")),
        ([], "cuda:1", "cpu", ("bfloat16", "bfloat16", "float32")),
        (["model.dtype=float32"], "cuda", "cuda", ("float32", "float32", "bfloat16")),
        (["model=hf_bf16"], "cpu", "cpu", ("bfloat16", "float32", "float32")),  # as it was before there was auto
        (["weights.wire_dtype=bfloat16", "engine.dtype=bfloat16"], "cpu", "cpu", ("float32", "bfloat16", "bfloat16")),
        ([], "", "", ("auto", "auto", "auto")),
    ],
)
def test_auto_is_half_precision_on_a_gpu_and_whole_on_a_cpu(overrides, learner, engine, found):
    assert dtypes(*overrides, learner=learner, engine=engine) == found


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "on_cpu"),
    [
        ([], True, False),
        (["model.activation_checkpointing=false"], False, False),
        (["model.activation_checkpointing=true"], True, True),
    ],
)
def test_activations_are_recomputed_on_a_gpu_unless_that_is_turned_off(overrides, on_gpu, on_cpu):
    config = load_config([*REQUIRED, *overrides])
    for device, found in (("cuda", on_gpu), ("cuda:1", on_gpu), ("cpu", on_cpu)):
        assert with_dtypes(config, learner=device).model.activation_checkpointing is found


def test_processes_agree_whatever_each_computes_on_and_with_those_of_before_there_was_auto():
    config = load_config(REQUIRED)
    for dtype in ("float32", "bfloat16"):  # a learner that is resumed has kept one; the replay server knows of none
        assert run_digest(config) == run_digest(load_config([*REQUIRED, f"weights.wire_dtype={dtype}"]))
    whole, half = (load_config([*REQUIRED, f"model.dtype={dtype}"]) for dtype in ("float32", "bfloat16"))
    assert learner_digest(with_dtypes(config, learner="cpu")) == learner_digest(whole)
    assert learner_digest(with_dtypes(config, learner="cuda")) == learner_digest(half)


def test_a_run_that_began_with_float32_keeps_it_when_a_resume_leaves_it_to_auto(tmp_path: Path):
    given = [*REQUIRED, "resume=auto", f"run.dir={tmp_path}"]
    config = load_config(given)
    assert kept_dtypes(config, given) == [], "nothing is there to go on with"
    (tmp_path / "config.yaml").write_text(
        "model: {dtype: float32}\nengine: {dtype: float32}\nweights: {wire_dtype: auto}\n"
    )
    kept = ["model.dtype=float32", "engine.dtype=float32"]
    assert kept_dtypes(config, given) == kept
    assert origins([*given, *kept_dtypes(config, given)], "grpo")["model.dtype"] == "config.yaml of the run"
    assert with_dtypes(load_config([*given, *kept]), learner="cuda").weights.wire_dtype == "float32"
    assert kept_dtypes(config, [*given, "model.dtype=auto"]) == kept[1:], "who types it, means it"
    assert kept_dtypes(load_config([*given, "model.dtype=bfloat16"]), given) == kept[1:]
    assert kept_dtypes(replace(config, resume="never"), given) == []


def test_what_auto_has_become_stands_in_the_run_and_is_kept_on_another_machine(tmp_path: Path):
    given = [*REQUIRED, "resume=auto", f"run.dir={tmp_path}"]
    config = load_config(given)
    prepare_run_folder(config, "first", overrides=given)
    chosen = with_dtypes(config, learner="cuda")
    begin_settings(config, {"model.dtype": chosen.model.dtype, "weights.wire_dtype": chosen.weights.wire_dtype})
    assert config_note(tmp_path) == ""
    kept = kept_dtypes(config, given)
    assert kept == ["model.dtype=bfloat16", "weights.wire_dtype=bfloat16"]
    resumed = load_config([*given, *kept])
    assert changes_in(resumed) == [] and run_digest(resumed) == run_digest(config)
    assert learner_digest(with_dtypes(resumed, learner="cpu")) == learner_digest(chosen)
    assert read_config(tmp_path / "config.yaml").engine.dtype == "auto", "each engine's own"
    begin_settings(config, {"model.dtype": "float32"})
    assert read_config(tmp_path / "config.yaml").model.dtype == "bfloat16", "it was chosen before"
