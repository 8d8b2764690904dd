"""A Hugging Face model over packed tokens: the base class of the policy (policy.py) and the critic (critic.py)."""

from __future__ import annotations

from enum import Enum

from jaxtyping import Float, Int
from torch import Tensor, nn

from asyncrl.learner.backends.base import HeldModel
from asyncrl.learner.batch.packing import Pack, Packing, as_rows


class Layout(str, Enum):
    PACKED = "packed"
    """Siblings share their prompt's tokens; `attention.packed_attention` keeps sequences separate."""
    ROWS = "rows"
    """[B, L], padded at the end, with transformers' own attention: correct for every causal model."""


class PackedModel(HeldModel):
    """A Hugging Face model over packed tokens. It is the FSDP root, so the head's weight is whole in `forward`."""

    layout: Layout = Layout.PACKED
    """Set at load (`layout.agree_on_layout`)."""
    reduce_each: bool = False
    """Gradients are reduced over the ranks with every micro-batch (`step.accumulation`)."""
    entries = ("seen_alone",)

    @property
    def rows(self) -> int:
        """Number of tokens that it knows."""
        return int(self.hf.config.get_text_config(decoder=True).vocab_size)

    @property
    def body(self) -> nn.Module:
        """The model without its head."""
        # For a text model taken out of a multimodal one (Llama 4), `base_model` is the model itself.
        return self.hf.get_submodule("model") if self.hf.base_model is self.hf else self.hf.base_model

    def hidden_states(
        self, input_ids: Int[Tensor, " tokens"], position_ids: Int[Tensor, " tokens"], packing: Packing
    ) -> Float[Tensor, "tokens width"]:
        """Hidden states of the last layer, in the compute dtype; only those of `sequence.own` if ranks share a pack."""
        if self.layout is Layout.PACKED:
            if self.sequence is not None:
                packing = self.sequence.apart(packing)
                input_ids, position_ids = self.sequence.own(input_ids), self.sequence.own(position_ids)
            out = self.body(
                input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, packing=packing
            )
            return out.last_hidden_state[0]
        # All rows at once, whatever their lengths: every rank must run every layer the same number of times.
        rows, slots = as_rows(packing)
        out = self.body(input_ids=input_ids[rows], use_cache=False)
        return out.last_hidden_state.flatten(0, 1).index_select(0, slots)

    def states_at(self, pack: Pack) -> tuple[Float[Tensor, "mine width"], Int[Tensor, " mine"] | None]:
        """`hidden_states` at those of `pack.predictors` that this rank has, and the indices of these among them (None:
        all)."""
        hidden, places = self.hidden_states(pack.input_ids, pack.position_ids, pack.packing), pack.predictors
        if self.sequence is None or self.layout is not Layout.PACKED:
            return hidden.index_select(0, places), None
        mine = self.sequence.mine(places)
        return hidden.index_select(0, self.sequence.of_mine(places[mine])), mine

    def told(self, values: Tensor, mine: Int[Tensor, " mine"] | None, count: int) -> Tensor:
        """[count, ...] results at all places, gathered from this rank's [mine, ...]."""
        if self.sequence is None or mine is None:
            return values
        return self.sequence.told(values, mine, count)

    def seen(self, pack: Pack) -> Float[Tensor, "tokens ..."]:
        """[T, ...] the values by which the layout is chosen, as training computes them in it."""
        raise NotImplementedError

    def seen_alone(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens ..."]:
        """[T, ...] the same for one sequence, as transformers computes it."""
        raise NotImplementedError

    def settle(self) -> None:
        """Call after a forward without backward, even if it failed: otherwise the weights stay gathered on every rank,
        and later readers of the parameters see them so."""
        if self.backend is not None:
            self.backend.settle(self)


def set_gradient_sync(model: PackedModel, last: bool) -> None:
    """Set whether the next backward reduces gradients over the ranks: that of the `last` micro-batch, or each."""
    if model.backend is not None:
        model.backend.sync(model, last or model.reduce_each)
