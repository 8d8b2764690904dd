"""A user-defined loss, `loss=custom loss.function=file.py:name`, and its trial before a run.

    def my_loss(inputs: LossInputs, **args) -> Tensor [T], or (Tensor [T], {"name": Tensor [T]})

It returns the loss of each token. The training loop applies mask and rejection, sums and divides: by the counts of the
whole optimizer batch over all ranks (`loss.aggregation`), so that the sum over micro-batches is the loss of the whole
batch, however it was split. This requires that the loss of a token depends only on its own sequence, which `try_loss`
checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import UserCodeError
from asyncrl.losses.inputs import LossInputs
from asyncrl.losses.ratios import Tokens, make_safe
from asyncrl.losses.surrogates import Shaped
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.user_code import called, made_once

HOST = torch.device("cpu")
INPUTS = tuple(each.name for each in dataclasses.fields(LossInputs))


def custom_loss(tokens: Tokens, config: LossConfig) -> Shaped:
    """Call the function on `tokens`: float32 or float64, 0 outside the loss mask, tokens without a recorded log-prob
    with a ratio of 1, gradient through `learner_logprobs` only.

    Raises:
        ConfigError: it cannot be loaded, or does not take `loss.args`.
        UserCodeError: it raised, or did not return a loss per token.
    """
    given = dataclasses.replace(
        tokens.raw,
        learner_logprobs=tokens.cur,
        behavior_logprobs=tokens.mu,
        proximal_logprobs=tokens.prox,
        ref_logprobs=tokens.ref,
        advantages=tokens.advantages,
    )
    named = f"loss.function={config.function}"
    tensors = {name: value for name in INPUTS if isinstance(value := getattr(given, name), Tensor)}
    writes = {name: value._version for name, value in tensors.items()}
    returned = called(made_once(config.function or "", config.args, "loss.function"), named, given)
    written = [name for name, value in tensors.items() if value._version != writes[name]]
    if written:
        raise UserCodeError(
            f"{named} wrote into inputs.{written[0]}, which the rest of the step still reads. Make a new tensor: "
            f"x = inputs.{written[0]}.clone(), or torch.where, in place of += and &="
        )
    loss, numbers = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    count = tokens.cur.shape
    if not isinstance(loss, Tensor) or loss.shape != count or not loss.is_floating_point():
        raise UserCodeError(
            f"{named} must return the loss of each token, a tensor of floats {list(count)} (the loop adds them up, by "
            f"loss.aggregation); got {_said(loss)}"
        )
    for name, values in _named_numbers(numbers, named):
        if not isinstance(values, Tensor) or values.shape != count:
            raise UserCodeError(f"{named}: its number {name!r} must be a tensor {list(count)}; got {_said(values)}")
    # A token outside the mask has no loss, whatever the function computed from its zeros.
    shares = torch.where(tokens.mask, loss.to(tokens.cur.dtype), 0.0)
    if not shares.requires_grad:
        # A constant is a valid loss of some micro-batch. Without a backward there, this rank would miss the collectives
        # in which the others wait for its gradients.
        shares = shares + 0.0 * tokens.cur
    return Shaped(shares, numbers={f"custom/{name}": values for name, values in _named_numbers(numbers, named)})


def _named_numbers(numbers: Any, named: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(numbers, dict):
        raise UserCodeError(
            f"{named} must return a tensor, or a tensor and a dictionary of tensors whose means are logged; got a "
            f"tensor and {_said(numbers)}"
        )
    yield from numbers.items()


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"


def try_loss(config: LossConfig, *, proximal: bool, reference: bool, device: torch.device = HOST) -> None:
    """Call the loss on an artificial batch, whole and sequence by sequence.

    Args:
        proximal, reference: whether a run would give it these log-probs.
        device: of the run's tensors. A loss that makes tensors of its own elsewhere fails there alone.

    Raises:
        ConfigError: it cannot be loaded.
        UserCodeError: it raises, does not return a loss per token, is not finite, has no gradient, or the loss of a
            token depends on other sequences than its own.
    """
    named = f"loss.function={config.function}"
    batch = _each(made_up(proximal=proximal, reference=reference), lambda value: value.to(device))
    whole, slope = _value_and_slope(batch, config, named)
    mask = batch.loss_mask
    if not bool(whole[mask].isfinite().all() and slope[mask].isfinite().all()):
        raise UserCodeError(
            f"{named} is not finite, or its gradient is not, on made-up tokens whose log-ratios are between -4 and 4"
        )
    if not bool((slope != 0).any()):
        raise UserCodeError(
            f"{named} has no gradient: nothing of what it returns depends on inputs.learner_logprobs. Use it at least "
            "once without detaching it"
        )
    for sequence in batch.sequence_ids.unique().tolist():
        place = batch.sequence_ids == sequence
        alone = _part_of(batch, place)
        for found, expected in zip(_value_and_slope(alone, config, named), (whole, slope), strict=True):
            if not torch.allclose(found, expected[place], rtol=1e-3, atol=1e-5):
                raise UserCodeError(
                    f"{named}: the loss of a token changes with the other sequences of the call. Which sequences "
                    "these are depends on packing and on the rank. Let the loss depend on inputs.sequence_ids alone, "
                    "and put comparisons between sequences into advantage.function"
                )
    nothing = dataclasses.replace(_part_of(batch, mask.nonzero()[:1, 0]), loss_mask=mask.new_zeros(1))
    _value_and_slope(nothing, config, named)  # the batch of a rank without trajectories, which only joins collectives


def made_up(*, proximal: bool, reference: bool) -> LossInputs:
    """An artificial batch: four sequences of two prompts, with 2 to 9 tokens and an observation in one of them."""
    lengths = torch.tensor([5, 9, 2, 7])
    count, draw = int(lengths.sum()), torch.Generator().manual_seed(0)
    cur = -3 * torch.rand(count, generator=draw) - 0.05

    def near() -> Tensor:
        return (cur + torch.randn(count, generator=draw).clamp(-4, 4)).clamp(max=0)

    sequences = torch.arange(4).repeat_interleave(lengths)
    mask = torch.ones(count, dtype=torch.bool)
    mask[8:10] = False
    return LossInputs(
        learner_logprobs=cur,
        behavior_logprobs=near(),
        advantages=torch.tensor([1.0, -0.5, 0.25, -2.0])[sequences],
        loss_mask=mask,
        sequence_ids=sequences,
        group_ids=torch.tensor([0, 0, 1, 1])[sequences],
        proximal_logprobs=near() if proximal else None,
        ref_logprobs=near() if reference else None,
        entropy=torch.rand(count, generator=draw),
        staleness=torch.randint(0, 3, (count,), generator=draw),
        group_tokens=torch.tensor([12.0, 12.0, 9.0, 9.0])[sequences],
    )


def _part_of(batch: LossInputs, place: Tensor) -> LossInputs:
    return _each(batch, lambda value: value[place])


def _each(batch: LossInputs, change: Callable[[Tensor], Tensor]) -> LossInputs:
    values = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
    return dataclasses.replace(batch, **{name: change(value) for name, value in values.items() if value is not None})


def _value_and_slope(batch: LossInputs, config: LossConfig, named: str) -> tuple[Tensor, Tensor]:
    """Loss of each token, and the gradient of the sum with respect to each log-prob."""
    cur = batch.learner_logprobs.clone().requires_grad_()
    loss = custom_loss(make_safe(dataclasses.replace(batch, learner_logprobs=cur)), config).loss
    if not loss.requires_grad:
        if not bool(batch.loss_mask.any()):
            return loss, torch.zeros_like(loss)
        raise UserCodeError(f"{named} has no gradient: compute it from inputs.learner_logprobs with torch's operations")
    called(lambda: loss.sum().backward(), f"the backward of {named}")
    assert cur.grad is not None
    return loss.detach(), cur.grad
