"""The settings that a run is evaluated with."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.cli.eval import engine_kind, prepared
from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.telemetry.folder.run_folder import prepare_run_folder

TRAINING = ("model.path=m", "data.path=train.jsonl", "reward.function=r.py:f", "rollout.top_p=0.9", "rollout.top_k=50")


def test_a_run_that_sampled_a_part_of_the_vocabulary_is_evaluated_as_eval_says_with_any_engine(tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare_run_folder(load_config([*TRAINING, "eval.path=held.jsonl", f"run.dir={run}"]), "id")
    (run / "hf").mkdir()
    config, _ = prepared(str(run), ["engine=vllm", "eval.temperature=1", "eval.top_p=0.7"])
    assert (config.engine.name, config.rollout.top_p, config.rollout.top_k) == ("vllm", 1.0, 0)
    assert (config.eval.temperature, config.eval.top_p) == (1.0, 0.7)
    with pytest.raises(ConfigError, match=r"Evaluations take eval\.top_p"):
        prepared(str(run), ["engine=vllm", "rollout.top_p=0.8"])
    server = ["engine=server", "engine.urls=[http://127.0.0.1:8000]", "rollout.top_p=1", "rollout.top_k=0"]
    with pytest.raises(ConfigError, match="servers that you started"):
        prepared(str(run), [*server, "rollout.workers=1"])


@pytest.mark.parametrize(("sees", "kind"), [("True", "cuda"), ("False", "cpu")])
def test_auto_is_what_torch_sees_and_not_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: str, kind: str
) -> None:
    (tmp_path / "torch.py").write_text(f"class cuda:\n    is_available = staticmethod(lambda: {sees})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = load_config([*TRAINING, "rollout.top_p=1", "rollout.top_k=0"])
    assert engine_kind(config) == kind
    config.engine.device = "cpu"
    assert engine_kind(config) == "cpu"


def test_a_torch_that_cannot_be_asked_for_its_gpus_is_told_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = load_config([*TRAINING, "rollout.top_p=1", "rollout.top_k=0"])
    with pytest.raises(ConfigError, match=r"ImportError: libcudart is not here\)\. Set engine\.dtype"):
        engine_kind(config)
