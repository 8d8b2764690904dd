"""The policy: a Hugging Face causal LM that turns a packed micro-batch into log-probs, sharded with FSDP2.

The reference and the averaged policy are the same class; the critic (critic.py) shares the packed backbone (packed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from asyncrl.checks.architecture import foreign_maths, logit_factor, longest_sequence
from asyncrl.checks.dtypes import dtype_on
from asyncrl.checks.loaded_weights import refuse_unequal
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.batch.packing import Pack
from asyncrl.learner.batch.support import Support
from asyncrl.learner.model.building import DTYPES, built
from asyncrl.learner.model.flops import Work
from asyncrl.learner.model.layout import blank, with_our_attention
from asyncrl.learner.model.loading import Recipe, as_config_error, of_transformers
from asyncrl.learner.model.logprobs import judged_logprobs, token_logprobs
from asyncrl.learner.model.lora import Adapters, add_adapters, base_fingerprint, start_adapters
from asyncrl.learner.model.packed import PackedModel
from asyncrl.learner.model.routing import RouterReplay
from asyncrl.learner.model.scores import refuse_scores
from asyncrl.learner.parallel.tensor import whole
from asyncrl.schema import Config, ModelConfig
from asyncrl.types import Routers

WRAPPER_PREFIX = "hf."
Made = Callable[[], PreTrainedModel]


class PolicyModel(PackedModel):
    """Maps packed tokens to log-probs of chosen tokens."""

    adapters: Adapters | None = None
    """With LoRA: the adapters, which alone are trained; everything else is frozen."""
    through_entropy: bool = False
    """Whether the entropy has a gradient, because the loss has an entropy bonus (`loss.entropy_coef`)."""
    entries = ("judge", "seen_alone")

    fp32_head: bool = False
    """See `model.fp32_head`."""
    replay: RouterReplay | None = None
    """With `learner.router_replay`: its routers choose the experts in `Packing.routing`."""

    def forward(
        self,
        pack: Pack,
        temperature: float,
        support: Support | None = None,
        candidates: Int[Tensor, "chosen k"] | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-prob of each token at `loss_positions` given the preceding tokens of its sequence, and the entropy there.

        Args:
            temperature: the sampling temperature, by which logits are divided.
            support: what each token at `loss_positions` was drawn from; None is the whole vocabulary.
            candidates: further tokens whose log-probs are wanted there.

        Returns:
            learner_logprobs, entropy: fp32 [T], 0 outside `loss_positions`. The entropy has a gradient only with
            `through_entropy`. With `candidates` also their log-probs, fp32 [chosen, k], with gradient.
        """
        hidden, mine = self.states_at(pack)
        wanted = pack.input_ids.index_select(0, pack.loss_positions)
        if candidates is not None:
            wanted = torch.cat([wanted[:, None], candidates], 1)
        if mine is not None:
            wanted, support = wanted[mine], None if support is None else support.of(mine)
        how = {"through_entropy": self.through_entropy, "wide": self.fp32_head}
        scores = token_logprobs(hidden, *self.head_weights, wanted, temperature / self.factor, support, **how)
        found, entropy = (self.told(each, mine, len(pack.predictors)) for each in scores)
        zeros = torch.zeros(len(pack.input_ids), dtype=torch.float32, device=hidden.device)
        chosen = found if candidates is None else found[:, 0]
        of_tokens = (zeros.index_copy(0, pack.loss_positions, each) for each in (chosen, entropy))
        return tuple(of_tokens) if candidates is None else (*of_tokens, found[:, 1:])

    @property
    def routers(self) -> Routers | None:
        """The routers that follow recorded choices; None if they choose themselves."""
        return None if self.replay is None else self.replay.routers

    @cached_property
    def work(self) -> Work:
        """Arithmetic per token."""
        return Work.of(self.hf, self.hf.config.to_dict(), self.head)

    @cached_property
    def factor(self) -> float:
        """Of what the head gives, in the logits."""
        return logit_factor(self.hf.config.to_dict())

    @property
    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the head, whole on every rank during the computation."""
        bias = self.head.bias
        return whole(self.head.weight), None if bias is None else whole(bias)

    @property
    def head(self) -> nn.Linear:
        """The layer that maps the last hidden states to logits."""
        head = self.hf.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    @torch.no_grad()
    def judge(self, pack: Pack) -> tuple[Float[Tensor, " chosen"], Bool[Tensor, " chosen"], Float[Tensor, " chosen"]]:
        """Log-probs bitwise as in `forward` at temperature 1, whether greedy decoding would have chosen each token, and
        the largest |logit| of its distribution."""
        hidden, mine = self.states_at(pack)
        wanted = pack.input_ids.index_select(0, pack.loss_positions)
        wanted = wanted if mine is None else wanted[mine]
        logprobs, likeliest, largest = judged_logprobs(
            hidden, *self.head_weights, wanted, 1.0 / self.factor, wide=self.fp32_head
        )
        found = logprobs, likeliest.to(logprobs.dtype), largest
        logprobs, counted, largest = (self.told(each, mine, len(pack.predictors)) for each in found)
        return logprobs, counted.bool(), largest

    def seen(self, pack: Pack) -> Float[Tensor, " tokens"]:
        """Log-prob of every token at temperature 1, 0 for the first of each sequence."""
        return self(pack, 1.0)[0]

    def seen_alone(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
        """The same for one sequence, computed by transformers alone."""
        logits = self.hf(input_ids=ids[None], use_cache=False).logits[0].float()
        scored = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return torch.cat([scored.new_zeros(1), scored])

    def named_hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What is published: `(Hugging Face name, parameter or its DTensor)`; a tied parameter once, under its first
        name. With LoRA only the adapters (`weights.adapter`)."""
        if self.adapters is not None:
            yield from self.adapters.published()
            return
        for name, parameter in self.named_parameters():
            yield name.removeprefix(WRAPPER_PREFIX), parameter.detach()


def build_model(
    config: Config,
    device: torch.device,
    backend: Backend | None,
    *,
    path: str = "",
    frozen: bool = False,
    averaged: bool = False,
) -> PolicyModel:
    """Load a policy with fp32 master weights on `device`, held by `backend` (None: a single rank).

    With `model.lora_rank` the base is frozen, in the compute dtype, and the fp32 master weights are the adapters.
    Weights that never change are in the compute dtype too: it is what they are rounded to before each use.

    Args:
        path: path of the checkpoint, as `reference.path`; empty is `model.path`.
        frozen: weights that never change, for the reference.
        averaged: without gradients, for the averaged policy.

    Raises:
        ConfigError: the checkpoint cannot be loaded, or the learner does not support how it computes its logits.
    """
    settings = replace(config.model, path=path or config.model.path)
    setting = f"reference.path={path}" if path else f"model.path={settings.path}"
    adapted = settings.lora_rank > 0 and not (frozen or averaged)
    compute, several = dtype_on(settings.dtype, device.type), backend is not None and backend.mesh.size() > 1
    # One rank reads a frozen model in float32: scores packed and alone are then compared as strictly as the policy's.
    kept = compute if adapted or (frozen and several) else "float32"

    def change(model: PolicyModel, read: nn.Module) -> None:
        refuse_scores(config, model.hf.config, device, model.layout)
        model.fp32_head = settings.fp32_head
        if frozen or averaged:
            model.requires_grad_(False)
        if frozen:
            keep_in(model, DTYPES[compute])
        if adapted:
            model.adapters = add_adapters(model.hf, settings, base_fingerprint(read))

    def start(model: PolicyModel) -> None:
        if model.adapters is not None:
            start_adapters(model.adapters, config.seed)

    way_out = "Give a directory with config.json and *.safetensors, or a hub name"
    with as_config_error(setting, "a causal LM", way_out):
        load, build = causal_lm(settings, setting, DTYPES[kept])
        recipe = Recipe(
            setting=setting,
            path=settings.path,
            load=load,
            build=build,
            make=PolicyModel,
            kept=kept,
            change=change,
            start=start,
        )
        return built(recipe, settings, longest_sequence(config), device, backend)


def keep_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters. Buffers are float32: frequencies of rotary embeddings lose too much in half precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.float()


def causal_lm(config: ModelConfig, setting: str, dtype: torch.dtype) -> tuple[Made, Made]:
    """Loads, or builds from its config, the Hugging Face model with our attention, on the CPU; see `Recipe`.

    Args:
        setting: the setting it comes from, for messages: `model.path=...`.

    Raises:
        ConfigError: the learner does not support how it computes its logits.
        one of `REFUSALS`: there is no config.
    """
    with of_transformers():
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=False)
    problem = foreign_maths(hf_config.to_dict())
    if problem:
        raise ConfigError(f"{setting}: {problem}")
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}

    def build() -> PreTrainedModel:
        with of_transformers():
            # Not in `dtype`: its buffers would be rounded, with them the bias by which DeepSeek-V3 chooses experts.
            model = blank(AutoModelForCausalLM, hf_config, **(options | {"dtype": torch.float32}))
        keep_in(model, dtype)
        model.config.dtype = dtype
        with suppress(OSError):  # a checkpoint may have none
            model.generation_config = GenerationConfig.from_pretrained(config.path)
        return model

    return partial(with_our_attention, partial(_load_whole, config.path, options)), build


def _load_whole(path: str, options: dict[str, Any], **attention: str) -> PreTrainedModel:
    """Load the whole model. Raises one of `REFUSALS`, also if the checkpoint lacks a weight or has one too
    many."""
    with of_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options, **attention)
    model, found = loaded
    refuse_unequal(type(model).__name__, found["missing_keys"], found["unexpected_keys"])
    _refuse_untied(model)
    keep_in(model, options["dtype"])  # transformers leaves some parameters in float32, and rounds some buffers
    return model


def _refuse_untied(model: PreTrainedModel) -> None:
    """Raises ValueError if the checkpoint has two different weights that its config declares tied: transformers loads
    both, but a model built from the config alone, as by vLLM or on another rank, has only one."""
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(name) is not model.get_parameter(other):
            raise ValueError(
                f"its config.json sets tie_word_embeddings, but its {name} differs from its {other}. Write "
                '"tie_word_embeddings": false there, or leave one of the two out'
            )
