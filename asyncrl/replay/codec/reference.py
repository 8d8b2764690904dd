"""Log-probs of a reference that come with the trajectories as extras (`reference.path=rollout`): what they have to be.

Asked three times of the same values: by the worker, while the group can still be made again; at the door of the replay,
since a group that was accepted is part of a step, and of that step again after every resume; and by the learner.
"""

from __future__ import annotations

import numpy as np

from asyncrl.errors import WireError
from asyncrl.types import MAX_LOGPROB, REF_LOGPROBS, GroupHeader, Trajectory

REFERENCE, FROM_ROLLOUT = "reference", "rollout"
"""What the learner announces when it needs them."""


def reference_fault(trajectory: Trajectory) -> str:
    """Empty when the trajectory brings the reference's log-probs of its sampled tokens.

    Those of other tokens may be anything, NaN included. A sampled one without would count as a KL of 0 in the loss, and
    end every sum of the KL in the reward.
    """
    given = trajectory.extras.get(REF_LOGPROBS)
    length = len(trajectory.token_ids)
    if given is None:
        return f"extras has no {REF_LOGPROBS!r}, the log-probs of the reference"
    if given.dtype != np.float32 or given.shape != (length,):
        return f"extras[{REF_LOGPROBS!r}] must be float32[{length}]; {given.dtype}{list(given.shape)} came"
    read = given[trajectory.loss_mask]
    if not np.isfinite(read).all() or (read > MAX_LOGPROB).any():
        return f"extras[{REF_LOGPROBS!r}] must be finite and not above 0 at every sampled token"
    return ""


def brings_reference(header: GroupHeader) -> list[bool]:
    """Of each trajectory."""
    return [any(extra.name == REF_LOGPROBS for extra in facts.extras) for facts in header.trajectories]


def require_reference(header: GroupHeader) -> None:
    """Raises WireError when a trajectory does not bring them."""
    lacking = brings_reference(header).count(False)
    if lacking:
        raise WireError(
            f"{lacking} trajectories of group {header.group_id} came without extras[{REF_LOGPROBS!r}], which the "
            "learner was told to expect (reference.path=rollout). Start the workers with the learner's settings"
        )
