"""A worker whose model differs from the learner's is told so before it allocates memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.engines.expected import expected_parameters
from asyncrl.errors import ModelMismatchError
from tests.learner.feed import tiny_checkpoint


def test_weights_of_another_model_are_refused_with_the_folder_and_the_way_out(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    expected = expected_parameters(str(path))
    for tensors, said in (
        ({"model.embed_tokens.weight": torch.zeros(280, 3)}, r"has shape \(280, 3\), the engine's model needs"),
        ({"model.other.weight": torch.zeros(1)}, r"unknown parameter 'model\.other\.weight'"),
    ):
        with pytest.raises(ModelMismatchError, match=rf"{said}.*model\.path={path} is another model here than"):
            expected.check(tensors)
