"""Checks log-probs of a reference that arrive with the trajectories as extras (`reference.path=rollout`).

The same values are checked three times: by the worker, while the group can still be generated again; by the replay
server on arrival, since an accepted group is part of a step, and of that step again after every resume; and by the
learner.
"""

from __future__ import annotations

import numpy as np

from asyncrl.errors import WireError
from asyncrl.types import MAX_LOGPROB, REF_LOGPROBS, GroupHeader, Trajectory

REFERENCE, FROM_ROLLOUT = "reference", "rollout"
"""Key and value that the learner announces if it needs these log-probs."""


def reference_fault(trajectory: Trajectory) -> str:
    """Return what is wrong; empty if the trajectory brings the reference's log-probs of its sampled tokens.

    Those of other tokens may have any value, including NaN. A sampled token without one would count as a KL of 0 in the
    loss, and make every sum of the KL in the reward non-finite.
    """
    given = trajectory.extras.get(REF_LOGPROBS)
    length = len(trajectory.token_ids)
    if given is None:
        return f"extras has no {REF_LOGPROBS!r}, the log-probs of the reference"
    if given.dtype != np.float32 or given.shape != (length,):
        return f"extras[{REF_LOGPROBS!r}] must be float32[{length}]; got {given.dtype}{list(given.shape)}"
    read = given[trajectory.loss_mask]
    if not np.isfinite(read).all() or (read > MAX_LOGPROB).any():
        return f"extras[{REF_LOGPROBS!r}] must be finite and not above 0 at every sampled token"
    return ""


def brings_reference(header: GroupHeader) -> list[bool]:
    """Return for each trajectory whether it brings reference log-probs."""
    return [any(extra.name == REF_LOGPROBS for extra in facts.extras) for facts in header.trajectories]


def require_reference(header: GroupHeader) -> None:
    """Raises WireError if a trajectory does not bring reference log-probs."""
    lacking = brings_reference(header).count(False)
    if lacking:
        raise WireError(
            f"{lacking} trajectories of group {header.group_id} arrived without extras[{REF_LOGPROBS!r}], which "
            "the learner needs (reference.path=rollout). Start the workers with the learner's settings"
        )
