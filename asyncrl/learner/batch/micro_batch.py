"""Packed tensors of one micro-batch, from the trajectories of a lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import LedgerError
from asyncrl.learner.batch.packing import Pack, Siblings, plan_packing, sent
from asyncrl.learner.batch.plan import Member
from asyncrl.learner.batch.recorded import reference_of, routing_of, topk_of
from asyncrl.learner.batch.support import Support, support_of
from asyncrl.replay.protocol import Lease
from asyncrl.types import NO_VERSION, Routers, StepPlan, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch(Pack):
    """One forward and backward of one rank. [T] packed tokens: per group its prompt once, then its completions.

    Example: a group with prompt `p q` and completions `a b` and `c`; the tokens at `loss_positions` are a, b and c::

        input_ids      [p q a b c]
        position_ids   [0 1 2 3 2]
        loss_mask      [0 0 1 1 1]
        predictors     [    1 2 1]      indices of q, a, q
    """

    loss_mask: Bool[Tensor, " tokens"]
    """Sampled tokens within the staleness bound: true at `loss_positions`."""
    behavior_logprobs: Float[Tensor, " tokens"]
    members: tuple[Member, ...]
    """The trajectories, in the order of `sequence_ids`; empty in a batch that only joins collectives."""
    groups: tuple[int, ...]
    """Ids of their groups."""
    sequence_ids: Int[Tensor, " tokens"]
    """Index of the trajectory in this micro-batch. A shared prompt has that of its first sibling; it is in no loss."""
    group_ids: Int[Tensor, " tokens"]
    """Position of the group in the step's plan."""
    group_tokens: Float[Tensor, " tokens"]
    """Fresh loss tokens of the whole group, over all ranks."""
    staleness: Int[Tensor, " tokens"]
    """Staleness of sampled tokens; 0 elsewhere."""
    truncated: int
    """Number of trajectories that ended at the length limit."""
    fresh: NDArray[np.int64]
    """[B] number of tokens at `loss_positions` of each member, on the host."""
    ages: tuple[int, ...]
    """The distinct values of `staleness` among them."""
    support: Support | None = None
    """What the tokens at `loss_positions` were drawn from; None if always the whole vocabulary."""
    topk_ids: Int[Tensor, "chosen k"] | None = None
    """With `loss.centering`, for the tokens at `loss_positions`: `types.TOPK_IDS`; the next field is
    `TOPK_LOGPROBS`."""
    topk_logprobs: Float[Tensor, "chosen k"] | None = None
    advantages: Float[Tensor, " tokens"] | None = None
    """This and the next: from `step.targets.with_targets`, which reads the fields below them."""
    value_targets: Float[Tensor, " tokens"] | None = None
    current_logprobs: Float[Tensor, " tokens"] | None = None
    """This and the following: filled in before the first update on the batch if the settings need them
    (`step/scoring.py`)."""
    proximal_logprobs: Float[Tensor, " tokens"] | None = None
    ref_logprobs: Float[Tensor, " tokens"] | None = None
    """Or filled in by `pack` if they come with the trajectories; 0 outside loss_mask."""
    values: Float[Tensor, " tokens"] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor field by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


PLACEHOLDER = Trajectory(
    token_ids=np.zeros(1, dtype=np.int32),
    loss_mask=np.zeros(1, dtype=np.bool_),
    behavior_logprobs=np.zeros(1, dtype=np.float32),
    policy_versions=np.full(1, NO_VERSION, dtype=np.int32),
    reward=0.0,
)
"""Run by a rank without trajectories, so that it joins the collectives of the others."""


def pack(
    lease: Lease,
    members: Sequence[Member],
    device: torch.device,
    *,
    reference: bool = False,
    topk: bool = False,
    routers: Routers | None = None,
) -> MicroBatch:
    """Pack `members` of the lease; without members one masked token, so that this rank still joins the collectives.

    Args:
        reference: the log-probs of the reference come with the trajectories.
        topk: read the most likely tokens (`engine.record_topk`), which come with the trajectories.
        routers: of a policy that must choose the experts that come with the trajectories (`learner.router_replay`).

    Raises:
        LedgerError: the arrays of a trajectory do not have as many fresh tokens as its header promised.
        EpisodeError: a trajectory lacks the log-probs of the reference, the most likely tokens, or the experts.
    """
    chosen = [lease.trajectories[member] for member in members] or [PLACEHOLDER]
    plan, packed_members, members = lease.plan, tuple(members), members or [(0, 0)]
    layout = _lay_out(members, chosen)

    def packed(arrays: Sequence[NDArray]) -> NDArray:
        return np.concatenate(arrays)[layout.source]

    sampled = packed([t.loss_mask for t in chosen])
    staleness = _staleness(plan, packed([t.policy_versions for t in chosen]), sampled)
    fresh = sampled & (staleness <= plan.max_staleness)
    fresh_of = {g: sum(map(plan.fresh_tokens, plan.groups[g].trajectories)) for g in {g for g, _ in members}}
    if chosen[0] is not PLACEHOLDER:
        _check_promise(plan, members, fresh, layout)
    loss_positions = np.flatnonzero(fresh)
    # For arrays with one row per sampled token of each trajectory: the row of each token at `loss_positions`.
    loss_rows = np.cumsum(np.concatenate([t.loss_mask for t in chosen]))[layout.source[loss_positions]] - 1
    per_sequence = {
        "sequence_ids": np.arange(len(members)),
        "group_ids": np.array([g for g, _ in members]),
        "group_tokens": np.array([fresh_of[g] for g, _ in members], dtype=np.float32),
    }
    per_token = {name: values[layout.sequence] for name, values in per_sequence.items()} | {
        "input_ids": packed([t.token_ids for t in chosen]).astype(np.int64),
        "position_ids": layout.position,
        "loss_mask": fresh,
        "loss_positions": loss_positions,
        "predictors": layout.rows[layout.source[loss_positions] - 1],
        "behavior_logprobs": packed([t.behavior_logprobs for t in chosen]),
        "staleness": staleness,
    }
    if reference:
        carried = packed(reference_of(plan, packed_members, chosen))
        # The values at other tokens are undefined.
        per_token["ref_logprobs"] = np.where(fresh, carried, np.float32(0))
    if topk:
        ids, logprobs = topk_of(plan, packed_members, chosen)
        per_token |= {"topk_ids": ids[loss_rows].astype(np.int64), "topk_logprobs": logprobs[loss_rows]}
    packing = plan_packing(layout.rows, layout.lengths, len(layout.source), device, layout.siblings)
    if routers is not None:
        routed = packed(routing_of(plan, packed_members, chosen, routers))
        packing = replace(packing, routing=sent(torch.from_numpy(routed), device))
    return MicroBatch(
        **{name: sent(torch.from_numpy(array), device) for name, array in per_token.items()},
        members=packed_members,
        groups=tuple(dict.fromkeys(plan.groups[g].group_id for g, _ in packed_members)),
        packing=packing,
        truncated=sum(t.finish_reason == "length" for t in chosen),
        fresh=np.bincount(layout.sequence[loss_positions], minlength=len(packed_members)),
        ages=tuple(np.unique(staleness[loss_positions]).tolist()),
        support=support_of(chosen, loss_rows, device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How the whole sequences laid end to end [E] and the pack [T] map to each other."""

    lengths: NDArray[np.int64]
    source: NDArray[np.int64]
    """[T] index in E of each packed token."""
    rows: NDArray[np.int64]
    """[E] packed token of each token of each sequence; siblings refer to the same tokens for their prompt."""
    position: NDArray[np.int64]
    """[T] position within its sequence."""
    sequence: NDArray[np.int64]
    """[T] index of its sequence."""
    siblings: Siblings


def _lay_out(members: Sequence[Member], chosen: Sequence[Trajectory]) -> _Layout:
    lengths = np.array([len(t.token_ids) for t in chosen])
    prompts = np.array([t.prompt_length for t in chosen])
    first: dict[tuple[int, bytes], int] = {}
    keys = [(g, t.token_ids[:n].tobytes()) for (g, _), t, n in zip(members, chosen, prompts, strict=True)]
    leader = np.array([first.setdefault(key, i) for i, key in enumerate(keys)])
    starts = np.cumsum(lengths) - lengths
    sequence = np.repeat(np.arange(len(chosen)), lengths)
    position = np.arange(lengths.sum()) - starts[sequence]
    kept = (position >= prompts[sequence]) | (leader[sequence] == sequence)
    representative = np.where(kept, np.arange(len(kept)), starts[leader[sequence]] + position)
    source = np.flatnonzero(kept)
    return _Layout(
        lengths=lengths,
        source=source,
        rows=(np.cumsum(kept) - 1)[representative],
        position=position[source],
        sequence=sequence[source],
        siblings=Siblings(leader=leader, prompts=prompts),
    )


def _staleness(plan: StepPlan, versions: NDArray[np.int32], sampled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[T] staleness of sampled tokens; a version that the plan does not contain counts as too old."""
    known = np.array(sorted(plan.staleness), dtype=np.int64)
    ages = np.array([plan.staleness[version] for version in sorted(plan.staleness)], dtype=np.int64)
    if not len(known):
        return np.zeros(len(versions), dtype=np.int64)
    place = np.minimum(np.searchsorted(known, versions), len(known) - 1)
    age = np.where(known[place] == versions, ages[place], plan.max_staleness + 1)
    return np.where(sampled, age, 0)


def _check_promise(plan: StepPlan, members: Sequence[Member], fresh: NDArray[np.bool_], layout: _Layout) -> None:
    promised = sum(plan.fresh_tokens(plan.groups[g].trajectories[t]) for g, t in members)
    if int(fresh.sum()) != promised:
        raise LedgerError(
            f"step {plan.step}: trajectories hold {int(fresh.sum())} loss tokens of staleness <= "
            f"{plan.max_staleness}, but their headers announced {promised}; the denominators of all ranks would be "
            "wrong"
        )
    if (fresh & (layout.position == 0)).any():
        raise LedgerError(
            f"step {plan.step}: a trajectory starts with a sampled token; nothing precedes it to predict it"
        )
