"""Settings of a run of a tiny model, in a folder of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.schema import Config, LearnerConfig, ModelConfig, RunConfig
from tests.learner.feed import tiny_checkpoint


def tiny_config(
    folder: Path, run: str = "run", *, kv_heads: int | None = None, model: dict[str, Any] | None = None, **sections: Any
) -> Config:
    """Settings of the run `folder / run`, of a model in `folder` that is made once. `learner` and `model` are settings
    by name; other sections are whole."""
    path = folder / "model"
    if not path.exists():
        tiny_checkpoint(path, **({} if kv_heads is None else {"num_key_value_heads": kv_heads}))
    return Config(
        run=RunConfig(dir=str(folder / run)),
        model=ModelConfig(path=str(path), **(model or {})),
        learner=LearnerConfig(**({"max_tokens_per_microbatch": 60} | sections.pop("learner"))),
        **sections,
    )
