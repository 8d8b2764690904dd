"""Supports of the tokens of a micro-batch. If sampling was truncated, the learner's distribution is renormalised over
the same tokens ("Keep Sampling Mask" of DeepSeek-V3.2, arXiv 2512.02556), so that a ratio compares two policies on the
same set, and not a full distribution with a truncated one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import LedgerError
from asyncrl.learner.batch.packing import sent
from asyncrl.recorded import SUPPORT, support_fault
from asyncrl.types import SUPPORT_BITS, SUPPORT_COUNTS, SUPPORT_IDS, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What each of C tokens was drawn from: a ragged list of ids, a row of bits, or neither for the whole
    vocabulary."""

    counts: NDArray[np.int64]
    """[C] as `support_counts`, on the host, so that offsets are computed without synchronising with the device."""
    ids: Int[Tensor, " listed"]
    bits: UInt8[Tensor, "wide bytes"]

    def narrow(self, logits: Float[Tensor, "rows V"], rows: slice) -> Float[Tensor, "rows V"]:
        """Set the logits of tokens outside the support of tokens `rows` to the lowest finite number, in place.

        Not -inf, because 0 * -inf would make a NaN in the entropy.
        """
        counts = self.counts[rows]
        if not counts.any():
            return logits
        return logits.masked_fill_(~self._inside(logits, rows, counts), torch.finfo(logits.dtype).min)

    def _inside(self, logits: Tensor, rows: slice, counts: NDArray[np.int64]) -> Bool[Tensor, "rows V"]:
        device, vocabulary = logits.device, logits.shape[-1]
        inside = torch.zeros(logits.shape, dtype=torch.bool, device=device)
        # Indices instead of masks: indexing with a mask synchronises with the GPU to count its set elements.
        inside[sent(torch.from_numpy(np.flatnonzero(counts == 0)), device)] = True
        before = self.counts[: rows.start]
        first = int(before[before > 0].sum())
        listed = np.maximum(counts, 0)
        places = sent(torch.from_numpy(np.repeat(np.arange(len(counts)), listed)), device)
        inside[places, self.ids[first : first + int(listed.sum())]] = True
        wide = counts < 0
        if wide.any():
            row = int((before < 0).sum())
            packed = self.bits[row : row + int(wide.sum())]
            eights = torch.arange(8, dtype=torch.uint8, device=device)
            unpacked = (packed[:, :, None] >> eights & 1).flatten(1).bool()
            inside[sent(torch.from_numpy(np.flatnonzero(wide)), device)] = unpacked[:, :vocabulary]
        return inside

    def of(self, tokens: Int[Tensor, " some"]) -> Support:
        """The supports of some of the tokens, in ascending order."""
        chosen = np.zeros(len(self.counts), dtype=bool)
        chosen[tokens.cpu().numpy()] = True
        listed = torch.from_numpy(np.repeat(chosen, np.maximum(self.counts, 0))).to(self.ids.device)
        wide = torch.from_numpy(chosen[self.counts < 0]).to(self.bits.device)
        return Support(counts=self.counts[chosen], ids=self.ids[listed], bits=self.bits[wide])

    @property
    def drawn_from(self) -> NDArray[np.int64]:
        """Sizes of the supports that are not the whole vocabulary."""
        return np.abs(self.counts[self.counts != 0])


def support_of(chosen: Sequence[Trajectory], rows: NDArray[np.int64], device: torch.device) -> Support | None:
    """Supports of the loss tokens at `rows`, counted over all sampled tokens of the trajectories `chosen`. None if no
    trajectory has any.

    Raises:
        LedgerError: a trajectory has an invalid support.
    """
    if not any(name in trajectory.extras for trajectory in chosen for name in SUPPORT):
        return None
    parts = [_arrays_of(trajectory) for trajectory in chosen]
    counts = np.concatenate([part[0] for part in parts])
    ids, bits = np.concatenate([part[1] for part in parts]), _stacked([part[2] for part in parts])
    listed = np.maximum(counts, 0).astype(np.int64)
    starts, row_of = np.cumsum(listed) - listed, np.cumsum(counts < 0) - 1
    taken = listed[rows]
    # Index of each wanted id: the start of its token's ids plus its own offset among them.
    place = np.repeat(starts[rows] - (np.cumsum(taken) - taken), taken) + np.arange(int(taken.sum()))
    return Support(
        counts=counts[rows].astype(np.int64),
        ids=sent(torch.from_numpy(ids[place].astype(np.int64)), device),
        bits=sent(torch.from_numpy(bits[row_of[rows][counts[rows] < 0]]), device),
    )


def _arrays_of(trajectory: Trajectory) -> tuple[NDArray, NDArray, NDArray]:
    if not any(name in trajectory.extras for name in SUPPORT):
        sampled = int(trajectory.loss_mask.sum())
        return np.zeros(sampled, np.int32), np.zeros(0, np.int32), np.zeros((0, 0), np.uint8)
    fault = support_fault(trajectory)
    if fault:
        raise LedgerError(f"a trajectory cannot be trained on: {fault}")
    return trajectory.extras[SUPPORT_COUNTS], trajectory.extras[SUPPORT_IDS], trajectory.extras[SUPPORT_BITS]


def _stacked(parts: Sequence[NDArray]) -> NDArray:
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if filled else np.zeros((0, 0), np.uint8)
