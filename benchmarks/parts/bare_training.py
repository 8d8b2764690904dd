"""Training as one would write it without a library: transformers alone, on the batches that the learner gets.

There are two layouts of a batch: rows padded to the longest (sorted by length, so that there is little padding), and
sequences laid end to end with `position_ids` that restart, which transformers' masks keep apart. Neither computes
logits of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.types import Trajectory


@dataclass(frozen=True)
class Part:
    """The part of a batch that one forward and backward gets."""

    inputs: dict[str, Tensor]
    keep: int | Tensor
    """`logits_to_keep` of transformers: the number of positions at the end of each row, or the positions."""
    targets: Tensor
    chosen: Tensor
    """Whether each of `targets` was sampled."""
    advantages: Tensor
    """Advantages; they broadcast to `targets`."""


def padded(members: Sequence[tuple[Trajectory, float]], prompt: int, budget: int) -> Iterator[Part]:
    """Yield parts of rows of similar length, at most `budget` slots each. All prompts have `prompt` tokens."""
    rows: list[tuple[Trajectory, float]] = []
    for member in [*sorted(members, key=lambda member: -len(member[0].token_ids)), None]:
        if member is None or (rows and (len(rows) + 1) * len(rows[0][0].token_ids) > budget):
            yield _padded(rows, prompt)
            rows = []
        if member is not None:
            rows.append(member)


def _padded(rows: Sequence[tuple[Trajectory, float]], prompt: int) -> Part:
    longest = max(len(each.token_ids) for each, _ in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    real = np.zeros((len(rows), longest), dtype=np.int64)
    for i, (each, _) in enumerate(rows):
        ids[i, : len(each.token_ids)], real[i, : len(each.token_ids)] = each.token_ids, 1
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(real)}
    advantages = torch.tensor([advantage for _, advantage in rows], dtype=torch.float32)
    return Part(
        inputs=inputs,
        keep=longest - prompt + 1,
        targets=inputs["input_ids"][:, prompt:],
        chosen=inputs["attention_mask"][:, prompt:].bool(),
        advantages=advantages[:, None],
    )


def end_to_end(members: Sequence[tuple[Trajectory, float]], budget: int) -> Iterator[Part]:
    """Return parts of at most `budget` tokens each. Sequences are packed first-fit, longest first."""
    bins: list[list[tuple[Trajectory, float]]] = []
    room: list[int] = []
    for member in sorted(members, key=lambda member: -len(member[0].token_ids)):
        length = len(member[0].token_ids)
        place = next((i for i, left in enumerate(room) if left >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(member)
        room[place] -= length
    return map(_end_to_end, bins)


def _end_to_end(rows: Sequence[tuple[Trajectory, float]]) -> Part:
    ids = torch.from_numpy(np.concatenate([each.token_ids for each, _ in rows]).astype(np.int64))
    places = torch.cat([torch.arange(len(each.token_ids)) for each, _ in rows])
    sampled = torch.from_numpy(np.concatenate([each.loss_mask for each, _ in rows])).nonzero()[:, 0]
    advantages = torch.cat([torch.full((int(each.loss_mask.sum()),), advantage) for each, advantage in rows])
    return Part(
        inputs={"input_ids": ids[None], "position_ids": places[None]},
        keep=sampled - 1,
        targets=ids[sampled][None],
        chosen=torch.ones(1, len(sampled), dtype=torch.bool),
        advantages=advantages[None],
    )


def bare_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> float:
    """Take one optimizer step of the plain policy gradient, with the gradient norm clipped to 1. Returns the loss."""
    count = sum(int(part.chosen.sum()) for part in parts)
    total = 0.0
    for part in parts:
        logits = model(**part.inputs, logits_to_keep=part.keep, use_cache=False).logits
        logits = logits[:, : part.targets.shape[1]].float()
        logprobs = logits.log_softmax(-1).gather(-1, part.targets[..., None])[..., 0]
        loss = -(torch.exp(logprobs - logprobs.detach()) * part.advantages * part.chosen).sum() / count
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total
