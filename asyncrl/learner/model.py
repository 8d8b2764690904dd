"""The policy: a Hugging Face causal LM that turns a packed micro-batch into log-probs, sharded with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.config import Config, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.attention import PACKED_ATTENTION, Packing
from asyncrl.learner.logprobs import token_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
"""Config fields of models whose logits are more than `lm_head(hidden)`; our head would compute other log-probs."""
WRAPPER_PREFIX = "hf."


class PolicyModel(nn.Module):
    """Packed tokens in, log-probs of chosen tokens out. The FSDP root, so the head's weight is whole in `forward`."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def forward(
        self,
        input_ids: Int[Tensor, " tokens"],
        position_ids: Int[Tensor, " tokens"],
        loss_positions: Int[Tensor, " chosen"],
        predictors: Int[Tensor, " chosen"],
        packing: Packing,
        temperature: float,
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        """Log-prob of each token at `loss_positions` given what precedes it in its sequence, and the entropy there.

        Args:
            loss_positions: places in [T] whose log-prob is wanted; the head is applied for no others.
            predictors: place of the token before each of them in its sequence.
            temperature: that of the sampling; logits are divided by it.

        Returns:
            learner_logprobs, entropy: fp32 [T], 0 outside `loss_positions`. The entropy has no gradient.
        """
        body = self.hf.base_model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, packing=packing
        )
        hidden = body.last_hidden_state[0].index_select(0, predictors)
        head = self.hf.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        chosen, entropy = token_logprobs(
            hidden, head.weight, head.bias, input_ids.index_select(0, loss_positions), temperature
        )
        zeros = torch.zeros(len(input_ids), dtype=torch.float32, device=hidden.device)
        return zeros.index_copy(0, loss_positions, chosen), zeros.index_copy(0, loss_positions, entropy)

    def named_hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """`(Hugging Face name, parameter or its DTensor)`; a tied parameter once, under its first name."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix(WRAPPER_PREFIX), parameter.detach()


def build_model(config: Config, device: torch.device, mesh: DeviceMesh | None) -> PolicyModel:
    """Load `model.path` with fp32 master weights on `device`, sharded over `mesh` (None: a single rank).

    Raises:
        ConfigError: the checkpoint cannot be loaded, or computes its logits in a way the learner does not.
    """
    hf = load_hf(config.model)
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the behaviour policy has none: dropout would make every log-ratio noise
    hf.train()
    if config.model.activation_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = PolicyModel(hf)
    compute = DTYPES[config.model.dtype]
    if mesh is None and compute == torch.float32:
        return model.to(device)
    assert mesh is not None
    shard(model, mesh, compute)
    return model


def load_hf(config: ModelConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The Hugging Face model with our attention, on the CPU.

    Raises:
        ConfigError: see `build_model`.
    """
    try:
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=False)
        transforms = [name for name in LOGIT_TRANSFORMS if _field(hf_config, name) not in (None, 1.0)]
        if transforms:
            raise ConfigError(
                f"model.path={config.path}: {hf_config.model_type} applies {', '.join(transforms)} to its logits, "
                "which the learner does not; use a model whose logits are lm_head(hidden)"
            )
        return AutoModelForCausalLM.from_pretrained(
            config.path, dtype=dtype, attn_implementation=PACKED_ATTENTION, trust_remote_code=False
        )
    except (OSError, KeyError) as error:
        raise ConfigError(
            f"model.path={config.path} cannot be loaded as a causal LM: {error}. "
            "Give a directory with config.json and *.safetensors, or a hub name"
        ) from error


def _field(hf_config: Any, name: str) -> Any:
    return hf_config.to_dict().get(name)


def shard(model: PolicyModel, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """FSDP2 in place: one group per decoder layer, one for the rest (embedding, final norm, head)."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    layer_classes = set(model.hf._no_split_modules or ())
    for module in list(model.hf.modules()):
        if type(module).__name__ in layer_classes:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def set_gradient_sync(model: PolicyModel, enabled: bool) -> None:
    """Whether the next backward reduces gradients over the ranks; off for all but the last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
