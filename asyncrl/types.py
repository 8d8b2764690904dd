"""The data types that all processes share: plain dataclasses over numpy, without torch or sockets.

Shapes: [T] tokens of one trajectory (prompt and completion), [N] tokens of one completion, [G] trajectories of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AsyncRLError

NO_VERSION = -1
"""`policy_version` of tokens that no policy sampled (prompt, observation), and of an engine that has no weights yet."""

GREEDY_REWARD = "greedy_baseline"
"""Reward component that workers add with `advantage.baseline=greedy`: the reward of the greedy completion."""

MAX_LOGPROB = 1e-3
"""Rounding can raise a log-prob slightly above 0. A log-prob above this bound means a broken engine."""

REF_LOGPROBS = "ref_logprobs"
"""Key of `Trajectory.extras` with `reference.path=rollout`: float32 [T], log-probs under the reference policy."""

SUPPORT_COUNTS = "support_counts"
"""Key of `Trajectory.extras` where sampling was truncated: int32 [N], the number of tokens that each sampled token was
drawn from. n > 0: they are the next n of `support_ids`. 0: the whole vocabulary. n < 0: they are -n tokens, the next
row of `support_bits`."""
SUPPORT_IDS = "support_ids"
"""Key of `Trajectory.extras`: int32, the token ids of each support in ascending order."""
SUPPORT_BITS = "support_bits"
"""Key of `Trajectory.extras`: uint8 [rows, ceil(vocabulary / 8)], one bit per token, the first of eight in the lowest
bit. For supports that take fewer bytes this way than as ids."""


TOPK_IDS = "topk_ids"
"""Key of `Trajectory.extras` with `engine.record_topk`: int32 [N, k], the k likeliest tokens of the distribution that
each token was sampled from, likeliest first."""
TOPK_LOGPROBS = "topk_logprobs"
"""Key of `Trajectory.extras`: float32 [N, k], their log-probs, not renormalised over the k; -inf where the
distribution has fewer than k tokens."""


ROUTED_EXPERTS = "routed_experts"
"""Key of `Trajectory.extras` with `learner.router_replay`: [S, layers, k], the experts that each MoE layer chose during
sampling for each of the S tokens before the last sampled one (see `Routers`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """The routers of a mixture-of-experts model."""

    layers: int
    """Number of layers that have experts."""
    chosen: int
    """Experts per layer that a token is sent to (top-k)."""
    experts: int
    """Experts per layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of `ROUTED_EXPERTS`: the smallest that can hold an expert's index."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.int16)


class DropReason(str, Enum):
    """Why a group left the ledger without being trained."""

    STALE = "stale"
    DEAD_BRANCH = "dead_branch"
    """Sampled by weights that a resume has rolled back. Its prompt returns to the stream."""
    FAILED_GENERATION = "failed_generation"
    FAILED_REWARD = "failed_reward"
    FAILED_ENVIRONMENT = "failed_environment"
    """The user's environment raised, or returned something that cannot be trained on."""
    FILTERED_ZERO_VARIANCE = "filtered_zero_variance"
    OVER_LENGTH = "over_length"
    FILTERED = "filtered"
    """Rejected by a function of `rollout.filters`."""
    FAILED_FILTER = "failed_filter"
    """A function of `rollout.filters` raised, or returned an invalid answer."""
    INCOMPLETE = "incomplete"
    """No worker finished it in time, or too few members succeeded in all attempts."""
    REJECTED = "rejected"
    WORKER_LOST = "worker_lost"
    SHUTDOWN = "shutdown"


REWARD_FAILURES = ("raised", "no_number", "timed_out", "exited", "lost", "environment")
"""Why a completion has no reward: the reward function raised, returned no finite number, passed its deadline, ended its
process, or was never called; or the environment failed."""


LOST_TOKENS = (
    "evaluation", "left_out", "refused",
    *(reason.value for reason in DropReason if reason.value.startswith(("failed_", "filtered", "incomplete"))),
)  # fmt: skip
"""Why sampled tokens reached no group at the replay server. `left_out`: tokens that belong to a group but to no loss,
such as a greedy baseline or what an environment leaves out. `refused`: the group came too late or was malformed."""


class StalePolicy(str, Enum):
    """What happens at lease time to tokens older than `max_staleness` (the consumption gate)."""

    MASK = "mask"
    DROP = "drop"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task instance. `index` is its position in the endless, seeded stream of prompts."""

    index: int
    epoch: int
    """How many times the rows of its source have been used before."""
    row: int
    """Row number in the data, from 0. With a mixture, rows are numbered through all sources in order."""
    token_ids: NDArray[np.int32]
    """[P], the prompt after chat template and tokenizer."""
    text: str
    where: str = "the row"
    """Location of the row, for errors."""
    source: str = ""
    """Its name in `data.mixture`; empty without a mixture."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The whole data row, `prompt` included. The reward function receives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float
    """0 is greedy; log-probs are then taken at temperature 1."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Stop strings. A completion ends with the first that appears, and contains it."""
    top_p: float = 1.0
    """Sample from the likeliest tokens whose probabilities add up to this; 1 is all. Applied last."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 is all. Applied after `min_p`."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the likeliest token's probability; 0 is all. Applied first."""

    record_topk: int = 0
    """How many of the likeliest tokens to record at each step (`TOPK_IDS`); 0 is none."""
    record_routing: bool = False
    """Whether to record the experts of each token (`ROUTED_EXPERTS`)."""

    @property
    def truncated(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary. Greedy decoding samples from none."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one sampled sequence."""

    token_ids: NDArray[np.int32]
    """[N], including the stop token if there was one."""
    logprobs: NDArray[np.float32]
    """[N], log-prob of each token under the distribution it was sampled from (temperature and truncation included)."""
    policy_versions: NDArray[np.int32]
    """[N], the version of the weights that sampled each token; non-decreasing."""
    finish_reason: str
    """`stop` or `length`."""
    trainable: bool = True
    """False if it was sampled at another temperature than the run's: the learner would compute other log-probs."""
    recorded: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Named arrays whose first axis grows with the tokens. `Trajectory.extras` of the same name is joined from them.
    `ROUTED_EXPERTS` begins with the prompt and ends before the last token, from which nothing was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled sequence with everything the loss needs.

    Example: prompt `ab>` and completion `ba<eos>` with an update after its first token::

        token_ids         [97 98 62 | 98 97 258]
        loss_mask         [ 0  0  0 |  1  1   1]
        behavior_logprobs [ 0  0  0 | -.7 -.2 -.1]
        policy_versions   [-1 -1 -1 |  4  5   5]
    """

    token_ids: NDArray[np.int32]
    """[T], prompt, then completion."""
    loss_mask: NDArray[np.bool_]
    """[T], true for sampled tokens; false for prompt and observation tokens."""
    behavior_logprobs: NDArray[np.float32]
    """[T], log mu of sampled tokens; 0 elsewhere."""
    policy_versions: NDArray[np.int32]
    """[T], the version that sampled the token; NO_VERSION elsewhere."""
    reward: float
    rewards: dict[str, float] = field(default_factory=dict)
    """Named components, if the reward function returned any."""
    turn_rewards: tuple[float, ...] = ()
    """Reward of each turn of the policy; a turn is an unbroken run of loss tokens. Empty if no rewards by turn were
    given. The difference between `reward` and their sum belongs to the last turn."""
    finish_reason: str = "stop"
    branch: bool = False
    """Whether this is another conversation of the same episode as the trajectory before it. Both are then one member of
    the group, with one reward."""
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Named arrays of any shape, attached by an environment or engine: log-probs of a teacher, an image, routed
    experts. They are stored and sent with the trajectory to the rank that trains it. The replay server checks only
    `ref_logprobs` and the `support_*`, `topk_*` and `routed_experts` that an engine recorded. Large arrays are sent
    without a copy, so nobody may write to an array after attaching it."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The sibling trajectories of one prompt: the unit of admission, storage and accounting."""

    group_id: int
    prompt_index: int
    attempt: int
    """From the assignment. An insert with an older attempt is refused."""
    worker: str
    trajectories: tuple[Trajectory, ...]
    prompt_text: str = ""
    completion_texts: tuple[str, ...] = ()
    """[G], decoded completions, for `samples.jsonl`. Never trained on."""
    started_at: float = 0.0
    finished_at: float = 0.0
    """Seconds since the epoch by the worker's clock; for metrics only."""
    lost: AsyncRLError | None = None
    """Why members are missing: the error of the last one that failed. Known in the worker only, never sent."""


@dataclass(frozen=True, slots=True)
class ExtraHeader:
    """One of `Trajectory.extras` without its bytes."""

    name: str
    dtype: str
    """In numpy's notation: `<f4`."""
    shape: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class TrajectoryHeader:
    """What the replay server and the batch planner know about a trajectory without reading its arrays.

    Treat it as immutable. It is not a frozen dataclass because those take 2.5 times as long to create, and three
    processes create one per trajectory.
    """

    length: int
    prompt_length: int
    reward: float
    version_tokens: tuple[tuple[int, int], ...]
    """Runs of `(policy_version, number of loss tokens)` in token order."""
    rewards: dict[str, float] = field(default_factory=dict)
    """As in `Trajectory`. Here too because a baseline needs those of siblings that another rank trains or that are too
    old to train."""
    turn_rewards: tuple[float, ...] = ()
    """As in `Trajectory`."""
    finish_reason: str = "stop"
    branch: bool = False
    """As in `Trajectory`."""
    extras: tuple[ExtraHeader, ...] = ()
    """In the order of their bytes on the wire."""

    @property
    def loss_tokens(self) -> int:
        runs = self.version_tokens
        return runs[0][1] if len(runs) == 1 else sum(count for _, count in runs)

    @property
    def earned(self) -> tuple[float, ...]:
        """`turn_rewards`, with the rest of `reward` added to the last turn; empty if there are none."""
        if not self.turn_rewards:
            return ()
        return (*self.turn_rewards[:-1], self.turn_rewards[-1] + self.reward - sum(self.turn_rewards))


def turns_in(loss_mask: NDArray[np.bool_]) -> int:
    """Number of turns of the policy: unbroken runs of loss tokens in a mask [T]."""
    return int(loss_mask[:1].sum()) + int(np.count_nonzero(loss_mask[1:] & ~loss_mask[:-1]))


def members_of(trajectories: Iterable[Trajectory | TrajectoryHeader]) -> list[int]:
    """[M], the index at which each member of a group begins. The trajectories up to the next index are its branches."""
    return [place for place, trajectory in enumerate(trajectories) if not trajectory.branch]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    group_id: int
    prompt_index: int
    attempt: int
    worker: str
    trajectories: tuple[TrajectoryHeader, ...]
    nbytes: int = 0
    """Size of the group's frames in bytes, for byte credits and the memory cap."""
    packed: bytes = field(default=b"", init=False, repr=False, compare=False)
    """Its encoded bytes, cached after encoding or decoding (`replay.codec.headers`). Not copied by `replace`."""

    @property
    def members(self) -> int:
        """Number of episodes: trajectories that are not branches."""
        return len(members_of(self.trajectories))

    @property
    def member_rewards(self) -> list[float]:
        """[M], the reward of each member."""
        return [trajectory.reward for trajectory in self.trajectories if not trajectory.branch]

    @property
    def versions(self) -> set[int]:
        """The policy versions that sampled its loss tokens."""
        return {version for trajectory in self.trajectories for version, _ in trajectory.version_tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """An order to a rollout worker to make this group. It is a lease, kept alive by heartbeats."""

    group_id: int
    prompt_index: int
    attempt: int
    """Increases by 1 each time the same group is issued again."""
    seed: int
    policy_version: int
    """The newest published version at the time of issue. The worker's engine may lag behind it (see admission)."""
    single: bool = False
    """Whether it is one member of a group that is admitted by sample. `group_id` is then the member's own id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One training batch. It is sealed: every rank gets the same, however often `lease(step)` is repeated."""

    step: int
    policy_version: int
    """The learner trains this step with this version, or with its child if the step was leased ahead."""
    groups: tuple[GroupHeader, ...]
    staleness: dict[int, int]
    """policy_version -> staleness at the time of training, for every version in `groups`."""
    max_staleness: int
    """Every rank masks out loss tokens with a larger staleness."""
    shards: tuple[tuple[tuple[int, int], ...], ...]
    """Per rank, the `(group index, trajectory index)` pairs it trains, balanced by packed tokens."""

    @property
    def all_fresh(self) -> bool:
        """Whether no loss token exceeds the staleness bound."""
        return max(self.staleness.values(), default=0) <= self.max_staleness

    def fresh_tokens(self, trajectory: TrajectoryHeader) -> int:
        """Number of loss tokens of `trajectory` within the staleness bound."""
        staleness, bound, fresh = self.staleness, self.max_staleness, 0
        for version, tokens in trajectory.version_tokens:
            if staleness[version] <= bound:
                fresh += tokens
        return fresh

    def tokens_by_staleness(self) -> dict[int, int]:
        """Staleness -> number of loss tokens trained at it, ascending. Tokens over the bound are not counted."""
        counts: dict[int, int] = {}
        for group in self.groups:
            for trajectory in group.trajectories:
                for version, tokens in trajectory.version_tokens:
                    age = self.staleness[version]
                    counts[age] = counts.get(age, 0) + tokens
        return {age: counts[age] for age in sorted(counts) if age <= self.max_staleness}
