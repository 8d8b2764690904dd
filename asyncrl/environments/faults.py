"""Finds faults in the episodes of a user's environment while their group can still be made again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from asyncrl.environments.base import Episodes
from asyncrl.errors import EpisodeError, GenerationError, RewardError, WireError
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.codec.group import group_header
from asyncrl.rewards.score import LARGEST
from asyncrl.types import Prompt, Trajectory, TrajectoryGroup, turns_in

FAILURES = (GenerationError, RewardError, EpisodeError)
"""Types that may take the place of a trajectory."""
DTYPES = {"token_ids": "int32", "loss_mask": "bool", "behavior_logprobs": "float32", "policy_versions": "int32"}
FINISHED = ("stop", "length")


def find_fault(episodes: object, prompt: Prompt, size: int, vocabulary: int) -> str:
    """Return what is wrong with `episodes`, or an empty string if they are `size` trainable siblings of `prompt`.

    Args:
        vocabulary: token ids are below it.
    """
    if not isinstance(episodes, Episodes):
        return f"run() returned {episodes!r:.80}, not Episodes"
    for name in ("trajectories", "texts", "failures"):
        if not isinstance(getattr(episodes, name), tuple | list):
            return f"{name} must be a tuple; got a {type(getattr(episodes, name)).__name__}"
    made, failures = episodes.trajectories, episodes.failures
    branches = sum(isinstance(trajectory, Trajectory) and trajectory.branch for trajectory in made)
    if len(made) - branches + len(failures) != size:
        came = f"got {len(made) - branches} trajectories and {len(failures)} failures"
        return f"{came}, but {size} episodes were asked for"
    if len(episodes.texts) != len(made) or not all(isinstance(text, str) for text in episodes.texts):
        return f"texts must have one str per trajectory; got {len(episodes.texts)} for {len(made)}, or other types"
    for failure in failures:
        if not isinstance(failure, FAILURES):
            return f"a failure must be a GenerationError, RewardError or EpisodeError; got {failure!r:.80}"
    for place, trajectory in enumerate(made):
        fault = trajectory_fault(trajectory, None if episodes.own_prompts else prompt.token_ids, vocabulary)
        if fault:
            return f"trajectory {place}: {fault}"
    return _wire_fault(tuple(made), tuple(episodes.texts))


def trajectory_fault(trajectory: object, prompt: NDArray[np.int32] | None, vocabulary: int) -> str:
    """Return what is wrong with one trajectory by itself, without its siblings and the limits of the wire format.

    Args:
        prompt: tokens that it must start with; None if the environment decides.
    """
    if not isinstance(trajectory, Trajectory):
        return f"got {trajectory!r:.80} instead of a Trajectory"
    ids = trajectory.token_ids
    for name, dtype in DTYPES.items():
        array = getattr(trajectory, name)
        if not isinstance(array, np.ndarray):
            return f"{name} must be a numpy array of {dtype}; got a {type(array).__name__}"
        if array.dtype != dtype or array.shape != np.shape(ids) or array.ndim != 1:
            return f"{name} must be {dtype}[{np.size(ids)}]; got {array.dtype}{list(array.shape)}"
    start = 1 if prompt is None else len(prompt)
    if trajectory.loss_mask[:1].any() or (prompt is not None and not begins_with(trajectory, prompt)):
        return f"it must begin with the prompt's {start} tokens, none of them in the loss mask"
    if not trajectory.loss_mask.any():
        return "its loss mask is empty: no token of it was sampled by the policy"
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"token ids must be in [0, {vocabulary}), the model's vocabulary; got {ids.min()} to {ids.max()}"
    if (np.diff(trajectory.policy_versions[trajectory.loss_mask]) < 0).any():
        return (
            "policy_versions of sampled tokens went down: each turn must be sampled with the weights of the turn "
            "before, or newer ones"
        )
    if trajectory.finish_reason not in FINISHED:
        return f"finish_reason must be stop or length; got {trajectory.finish_reason!r:.40}"
    earned = trajectory.turn_rewards
    if not isinstance(earned, tuple) or (earned and len(earned) != turns_in(trajectory.loss_mask)):
        return (
            f"turn_rewards must be a tuple, empty or with one number per turn ({turns_in(trajectory.loss_mask)} here)"
        )
    given = [each for each in (trajectory.reward, *earned) if isinstance(each, int | float)]
    if largest := max((each for each in given if abs(each) > LARGEST), key=abs, default=0):
        return f"a reward is {largest:g}. The learner computes in float32: it must be at most {LARGEST:g} in size"
    if not isinstance(trajectory.extras, Mapping) or not isinstance(trajectory.rewards, Mapping):
        return "extras and rewards must be dictionaries"
    if not all(isinstance(name, str) for name in trajectory.rewards):
        return f"rewards must be named by strings; got {list(trajectory.rewards)!r:.80}"
    return ""


def begins_with(trajectory: Trajectory, prompt: NDArray[np.int32]) -> bool:
    """Whether the trajectory starts with all of the prompt, none of it in the loss mask."""
    start = len(prompt)
    return np.array_equal(trajectory.token_ids[:start], prompt) and not trajectory.loss_mask[:start].any()


def _wire_fault(made: tuple[Trajectory, ...], texts: tuple[str, ...]) -> str:
    """Return what the replay server would refuse; there it would end the worker, with the engine blamed."""
    group = TrajectoryGroup(group_id=0, prompt_index=0, attempt=0, worker="", trajectories=made)
    try:
        if made:
            headers.decode_group_header(headers.encode_group_header(group_header(group)))
            wire.pack(texts)
            for text in (*texts, *(name for trajectory in made for name in trajectory.rewards)):
                text.encode()  # on the wire half a surrogate pair would silently become another character
    except WireError as error:
        return str(error)
    except UnicodeEncodeError as error:
        return f"cannot be sent: {error}"
    return ""
