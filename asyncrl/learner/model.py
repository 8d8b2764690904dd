"""The policy: a Hugging Face causal LM that turns a packed micro-batch into log-probs, sharded with FSDP2.

The reference and the averaged policy are the same class; the critic (critic.py) shares the packed backbone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.checks.architecture import foreign_maths
from asyncrl.errors import ConfigError
from asyncrl.exact.model import make_exact
from asyncrl.learner.attention import EXACT_PACKED_ATTENTION, PACKED_ATTENTION, Packing, as_rows
from asyncrl.learner.flops import Work
from asyncrl.learner.layout import Layout, agree_on_layout
from asyncrl.learner.loading import REFUSALS, fill_from_rank_zero, load_on_rank_zero, load_proven
from asyncrl.learner.logprobs import judged_logprobs, token_logprobs
from asyncrl.learner.lora import Adapters, add_adapters
from asyncrl.learner.scores import refuse_scores
from asyncrl.learner.support import Support
from asyncrl.schema import Config, ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WRAPPER_PREFIX = "hf."
Packed = TypeVar("Packed", bound="PackedModel")


class PackedModel(nn.Module):
    """A Hugging Face model over packed tokens. The FSDP root, so the head's weight is whole in `forward`."""

    layout: Layout = Layout.PACKED
    """Set at load (`agree_on_layout`)."""
    reduce_each: bool = False
    """Gradients are reduced over the ranks with every micro-batch (`accumulation`)."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    @property
    def body(self) -> nn.Module:
        """All but the head."""
        # Of a model of text that was taken out of one with pictures (Llama 4) `base_model` is itself.
        return self.hf.get_submodule("model") if self.hf.base_model is self.hf else self.hf.base_model

    def hidden_states(
        self, input_ids: Int[Tensor, " tokens"], position_ids: Int[Tensor, " tokens"], packing: Packing
    ) -> Float[Tensor, "tokens width"]:
        """Of the last layer, in the compute dtype."""
        if self.layout is Layout.PACKED:
            out = self.body(
                input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, packing=packing
            )
            return out.last_hidden_state[0]
        # All rows at once, whatever their lengths: every rank must run every layer equally often.
        rows, slots = as_rows(packing)
        out = self.body(input_ids=input_ids[rows], use_cache=False)
        return out.last_hidden_state.flatten(0, 1).index_select(0, slots)


class PolicyModel(PackedModel):
    """Packed tokens in, log-probs of chosen tokens out."""

    adapters: Adapters | None = None
    """With LoRA: what is trained; all else is frozen."""
    exact: bool = False
    """Log-probs are bit for bit those of an exact engine (`compute_exactly`)."""
    through_entropy: bool = False
    """The entropy has a gradient: the loss has a bonus for it (`loss.entropy_coef`)."""

    fp32_head: bool = False
    """As `model.fp32_head`."""

    def forward(
        self,
        input_ids: Int[Tensor, " tokens"],
        position_ids: Int[Tensor, " tokens"],
        loss_positions: Int[Tensor, " chosen"],
        predictors: Int[Tensor, " chosen"],
        packing: Packing,
        temperature: float,
        support: Support | None = None,
        candidates: Int[Tensor, "chosen k"] | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-prob of each token at `loss_positions` given what precedes it in its sequence, and the entropy there.

        Args:
            loss_positions: places in [T] whose log-prob is wanted; the head is applied for no others.
            predictors: place of the token before each of them in its sequence.
            temperature: that of the sampling; logits are divided by it.
            support: what each token at `loss_positions` was drawn from; None is the whole vocabulary.
            candidates: other tokens whose log-probs are wanted there.

        Returns:
            learner_logprobs, entropy: fp32 [T], 0 outside `loss_positions`. The entropy has a gradient only where it
            is asked for. With `candidates` also their log-probs, fp32 [chosen, k], with gradient.
        """
        hidden = self.hidden_states(input_ids, position_ids, packing).index_select(0, predictors)
        head = self.head
        wanted = input_ids.index_select(0, loss_positions)
        if candidates is not None:
            wanted = torch.cat([wanted[:, None], candidates], 1)
        how = {"exact": self.exact, "through_entropy": self.through_entropy, "wide": self.fp32_head}
        found, entropy = token_logprobs(hidden, head.weight, head.bias, wanted, temperature, support, **how)
        zeros = torch.zeros(len(input_ids), dtype=torch.float32, device=hidden.device)
        chosen = found if candidates is None else found[:, 0]
        of_tokens = zeros.index_copy(0, loss_positions, chosen), zeros.index_copy(0, loss_positions, entropy)
        return of_tokens if candidates is None else (*of_tokens, found[:, 1:])

    @cached_property
    def work(self) -> Work:
        """What a token costs."""
        return Work.of(self.hf, self.hf.config.to_dict(), self.head)

    @property
    def head(self) -> nn.Linear:
        """From the last hidden states to logits."""
        head = self.hf.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    @torch.no_grad()
    def judge(
        self,
        input_ids: Int[Tensor, " tokens"],
        position_ids: Int[Tensor, " tokens"],
        loss_positions: Int[Tensor, " chosen"],
        predictors: Int[Tensor, " chosen"],
        packing: Packing,
    ) -> tuple[Float[Tensor, " chosen"], Bool[Tensor, " chosen"]]:
        """Log-probs as `forward` gives them at temperature 1, and which tokens greedy decoding would have written."""
        hidden = self.hidden_states(input_ids, position_ids, packing).index_select(0, predictors)
        wanted = input_ids.index_select(0, loss_positions)
        return judged_logprobs(hidden, self.head.weight, self.head.bias, wanted, wide=self.fp32_head)

    def seen(
        self, ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"], packing: Packing
    ) -> Float[Tensor, " tokens"]:
        """Log-prob of every token but the first of each sequence (0) at temperature 1; see `layout.Probed`."""
        chosen = positions.nonzero()[:, 0]
        return self(ids, positions, chosen, chosen - 1, packing, 1.0)[0]

    def seen_alone(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
        """The same by nothing but transformers."""
        logits = self.hf(input_ids=ids[None], use_cache=False).logits[0].float()
        scored = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return torch.cat([scored.new_zeros(1), scored])

    def named_hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What is published: `(Hugging Face name, parameter or its DTensor)`; a tied parameter once, under its first
        name. With LoRA the adapters alone (`weights.adapter`)."""
        if self.adapters is not None:
            yield from self.adapters.published()
            return
        for name, parameter in self.named_parameters():
            yield name.removeprefix(WRAPPER_PREFIX), parameter.detach()


def build_model(
    config: Config,
    device: torch.device,
    mesh: DeviceMesh | None,
    *,
    path: str = "",
    frozen: bool = False,
    exact: bool = False,
) -> PolicyModel:
    """Load a policy with fp32 master weights on `device`, sharded over `mesh` (None: a single rank).

    With `model.lora_rank` the base is frozen, in the compute dtype, and the fp32 master weights are the adapters.

    Args:
        path: of the checkpoint; empty is `model.path`.
        frozen: without gradients: the reference, the averaged policy.
        exact: as `engine.exact`.

    Raises:
        ConfigError: the checkpoint cannot be loaded, or computes its logits in a way the learner does not.
    """
    settings = replace(config.model, path=path or config.model.path)
    adapted = settings.lora_rank > 0 and not frozen
    kept = settings.dtype if adapted else "float32"
    hf = prepare(load_hf(settings, DTYPES[kept], mesh), settings)
    model = PolicyModel(hf)
    agree_on_layout(model, f"model.path={settings.path}", kept, longest_sequence(config), mesh)
    refuse_scores(config, hf.config, device, model.layout)
    if exact:
        compute_exactly(model, device)
    if frozen:
        model.requires_grad_(False)
    if adapted:
        model.adapters = add_adapters(hf, settings, config.seed, device)
    return place(model, settings, device, mesh)


def compute_exactly(model: PolicyModel, device: torch.device) -> None:
    """Let `model`, in float32, compute the log-probs of an exact engine, however it is packed or sharded.

    Raises:
        ConfigError: see `make_exact`.
    """
    make_exact(model.hf, device)
    model.exact = True
    model.hf.config._attn_implementation = EXACT_PACKED_ATTENTION


def longest_sequence(config: Config) -> int:
    """Tokens."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def prepare(hf: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """Ready to train: nothing drawn at random, activation checkpointing where asked for.

    The behaviour policy drops and draws nothing: what this one did would be noise in every log-ratio.
    """
    hf.eval()  # routers, too, draw when they are told that they are trained
    if not config.activation_checkpointing:
        return hf
    hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = (module for module in hf.modules() if isinstance(module, GradientCheckpointingLayer))
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % config.checkpoint_every == 0
    for module in hf.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # asked by whoever keeps no activations; what is inside it stays as it is
            for name in [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]:
                setattr(module, name, 0.0)  # OPT and others drop by hand
    return hf


def place(model: Packed, config: ModelConfig, device: torch.device, mesh: DeviceMesh | None) -> Packed:
    """On `device`, sharded over `mesh`; whole on one rank in float32, where FSDP2 has nothing to shard or cast and its
    hooks took a fifth of a small model's step. None is one rank, too."""
    compute = DTYPES[config.dtype]
    if (mesh is None or mesh.size() == 1) and compute == torch.float32:
        return model.to(device)
    assert mesh is not None
    shard(model, mesh, compute)
    return model


def load_hf(config: ModelConfig, dtype: torch.dtype = torch.float32, mesh: DeviceMesh | None = None) -> PreTrainedModel:
    """The Hugging Face model with our attention, on the CPU; see `load_on_rank_zero` for the ranks of `mesh`.

    Raises:
        ConfigError: see `build_model`.
    """
    try:
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=False)
        problem = foreign_maths(hf_config.to_dict())
        if problem:
            raise ConfigError(f"model.path={config.path}: {problem}")
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": PACKED_ATTENTION, "trust_remote_code": False}
        return load_on_rank_zero(
            lambda: load_proven(config.path, lambda: _load_whole(config.path, options)),
            lambda: AutoModelForCausalLM.from_config(hf_config, **options),
            mesh,
        )
    except ConfigError:
        raise  # a ValueError too, and complete as it is
    except REFUSALS as error:
        raise ConfigError(
            f"model.path={config.path} cannot be loaded as a causal LM: {error}. "
            "Give a directory with config.json and *.safetensors, or a hub name"
        ) from error


def _load_whole(path: str, options: dict[str, Any]) -> PreTrainedModel:
    """Raises ValueError where the checkpoint lacks a weight: transformers makes it at random and says so in a log."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        some = ", ".join(missing[:4]) + (" ..." if len(missing) > 4 else "")
        raise ValueError(f"its checkpoint has no {some} ({len(missing)} weights), which would be made at random")
    return model


def shard(model: PackedModel, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """FSDP2 in place: one group per decoder layer, one for the rest (embedding, final norm, head)."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    layer_classes = set(model.hf._no_split_modules or ())
    for module in list(model.hf.modules()):
        if type(module).__name__ in layer_classes:
            fill_from_rank_zero(module, mesh)
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fill_from_rank_zero(model, mesh)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if isinstance(model, PolicyModel):
        register_fsdp_forward_method(model, "judge")  # or it would compute with the shards alone


def set_gradient_sync(model: PackedModel, last: bool) -> None:
    """Whether the next backward reduces gradients over the ranks: that of the `last` micro-batch, or of each."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or model.reduce_each)


def reshard(model: PackedModel) -> None:
    """After a forward without backward: else the root's weights stay whole on every rank, and are seen so by whoever
    reads the parameters next."""
    if isinstance(model, FSDPModule):
        model.reshard()
