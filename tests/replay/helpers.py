"""Groups, settings and a real server in a thread, for the tests of the replay."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.serving import run_server
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import (
    NO_VERSION,
    Assignment,
    ExtraHeader,
    GroupHeader,
    StalePolicy,
    Trajectory,
    TrajectoryGroup,
    TrajectoryHeader,
)
from benchmarks.parts.keys import some_keys
from tests.addresses import free_address


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ClockAhead:
    """The monotonic clock, set ahead by `ahead_s` seconds. Tests use it in place of what `awake_clock` makes."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def settings(**changes) -> AdmissionSettings:
    values = {
        "groups_per_step": 2,
        "group_size": 2,
        "max_staleness": 2,
        "pipeline_depth": 1,
        "max_in_flight": 16,
        "stale_policy": StalePolicy.MASK,
    }
    return AdmissionSettings(**(values | changes))


def header(assignment: Assignment, *runs: tuple[int, int], group_size: int = 2, nbytes: int = 10) -> GroupHeader:
    """Return a header whose trajectories all have these `(version, tokens)` runs, a prompt of 3 tokens and an image."""
    length = 3 + sum(count for _, count in runs)
    image = (ExtraHeader("image", "|u1", (2, 3)),)
    trajectory = TrajectoryHeader(length=length, prompt_length=3, reward=1.0, version_tokens=runs, extras=image)
    return GroupHeader(
        group_id=assignment.group_id,
        prompt_index=assignment.prompt_index,
        attempt=assignment.attempt,
        worker="w",
        trajectories=(trajectory,) * group_size,
        nbytes=nbytes,
    )


def trajectory(versions: list[int], prompt: int = 2, reward: float = 0.5, first_token: int = 7) -> Trajectory:
    tokens = prompt + len(versions)
    mask = np.arange(tokens) >= prompt
    all_versions = np.full(tokens, NO_VERSION, np.int32)
    all_versions[mask] = versions
    logprobs = np.zeros(tokens, np.float32)
    logprobs[mask] = -0.25 * (1 + np.arange(len(versions)) % 5)
    return Trajectory(
        token_ids=np.arange(first_token, first_token + tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=logprobs,
        policy_versions=all_versions,
        reward=reward,
        rewards={"format": 1.0},
        finish_reason="length",
    )


def extras(seed: int, tokens: int) -> dict[str, np.ndarray]:
    """Return extras of a trajectory. They include NaNs, which no check of log-probs would accept."""
    teacher = np.arange(seed, seed + tokens, dtype=np.float32)
    teacher[::2] = np.nan
    return {
        "teacher": teacher,
        "image": np.arange(seed, seed + 30).astype(np.uint8).reshape(5, 2, 3),
        "seen": np.arange(seed, seed + 3) % 2 == 0,
    }


def group(assignment: Assignment, versions: list[int], size: int = 2, worker: str = "w") -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=assignment.group_id,
        prompt_index=assignment.prompt_index,
        attempt=assignment.attempt,
        worker=worker,
        trajectories=tuple(
            replace(
                trajectory(versions, reward=float(n), first_token=10 * n + assignment.group_id),
                extras=extras(10 * n + assignment.group_id, len(versions)) if n % 3 == 0 else {},
            )
            for n in range(size)
        ),
        prompt_text="what?",
        completion_texts=tuple(f"answer {n} ü" for n in range(size)),
        started_at=1.0,
        finished_at=2.0,
    )


def same_extras(a: Trajectory, b: Trajectory) -> bool:
    """Return whether the extras of two trajectories are equal byte for byte."""
    one, other = (
        [(name, x.dtype, x.shape, x.tobytes()) for name, x in trajectory.extras.items()] for trajectory in (a, b)
    )
    return one == other


def same_trajectory(a: Trajectory, b: Trajectory) -> bool:
    arrays = ("token_ids", "loss_mask", "behavior_logprobs", "policy_versions")
    equal = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays) and same_extras(a, b)
    return equal and (a.reward, a.rewards, a.finish_reason) == (b.reward, b.rewards, b.finish_reason)


SOON_SILENT_S = 1.5
"""`heartbeat_timeout_s` in seconds for tests in which a peer falls silent and others may be taken for silent too. Other
tests use a longer timeout, so that a peer delayed by a busy machine is not taken for silent."""


def replay_config(**changes) -> ReplayConfig:
    values = {
        "address": free_address(),
        "keys": some_keys(),
        "heartbeat_s": 0.1,
        "heartbeat_timeout_s": 20.0,
        "wait_timeout_s": 40.0,
    }
    return ReplayConfig(**(values | changes))


@contextlib.contextmanager
def running_server(config: ReplayConfig, admission: AdmissionSettings, digest: str = "d") -> Iterator[threading.Thread]:
    """Run a real server in a thread, which is stopped and joined at the end."""
    stop = threading.Event()
    thread = threading.Thread(target=run_server, args=(config, admission, "run", digest, 7, stop), daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"


def close_all(clients: Iterable[LearnerClient | RolloutClient]) -> None:
    """Close the clients in the order given. Clients of workers close in an event loop of their own."""
    for client in clients:
        closed = client.close()
        if closed is not None:
            asyncio.run(closed)
