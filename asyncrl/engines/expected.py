"""Names, shapes and dtypes that a model's weights must have, for any engine; checked before memory is allocated for
them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.engines.parameters import ParameterTable
from asyncrl.errors import ModelMismatchError
from asyncrl.weights.adapter import is_adapter


class ExpectedWeights:
    """The parameters of a model without its data.

    Args:
        path: path of the model, for messages.
    """

    def __init__(self, model: torch.nn.Module, path: str) -> None:
        self._path = path
        self._table = ParameterTable(model)
        self._nbytes = sum(4 * parameter.numel() for parameter in model.parameters())

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise for weights that do not fit. An adapter, whose names the engine checks itself, is only refused if it is
        larger than the model.

        Raises:
            ModelMismatchError: names the first parameter that is unknown, missing, or of another shape or dtype.
        """
        if not is_adapter(tensors):
            try:
                self._table.check(tensors)
            except ModelMismatchError as error:
                raise ModelMismatchError(f"{error}. {self._other_model()}") from error
            return
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if nbytes > self._nbytes:
            raise ModelMismatchError(
                f"received an adapter of {nbytes} bytes for a model of {self._nbytes} bytes. {self._other_model()}"
            )

    def _other_model(self) -> str:
        return (
            f"model.path={self._path} is another model here than on the learner's machine. Copy the learner's to this "
            "machine"
        )


def expected_parameters(path: str) -> ExpectedWeights:
    """Return the expected weights of the checkpoint at `path`, from its config alone."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    with torch.device("meta"):
        return ExpectedWeights(AutoModelForCausalLM.from_config(config), path)
