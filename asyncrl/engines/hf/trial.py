"""Checks whether the built-in engine can batch a model, from its config alone. Runs before a start in its own process,
since transformers takes seconds to import.

`python -m asyncrl.engines.hf.trial ANSWER_FD PARENT_PID` is internal.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from asyncrl.engines.hf.kv import check_mergeable
from asyncrl.errors import ConfigError
from asyncrl.user_code import answer


def trial(settings: dict[str, Any]) -> None:
    """Raises ConfigError: the engine cannot batch the model."""
    kind: Any = None
    try:
        config = AutoConfig.from_pretrained(settings["folder"], local_files_only=True)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    except Exception:  # a config that transformers cannot read is refused when the model is loaded
        return
    try:
        check_mergeable(kind, config)
    except ConfigError as error:
        raise ConfigError(f"model.path={settings['path']}: {error}") from error


if __name__ == "__main__":
    answer(sys.argv[1:], trial)
