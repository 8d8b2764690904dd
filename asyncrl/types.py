"""The nouns: plain dataclasses over numpy. No torch, no sockets; every process imports this module.

Shape language: [T] tokens of one trajectory (prompt and completion), [N] tokens of one completion, [G] group.
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
"""`policy_version` of a token that no policy sampled (prompt, observation), and of an engine not yet loaded."""

GREEDY_REWARD = "greedy_baseline"
"""Named component that workers add under `advantage.baseline=greedy`: the reward of the greedy completion."""

MAX_LOGPROB = 1e-3
"""Rounding may lift a log-prob a little above 0; more is a broken engine."""

REF_LOGPROBS = "ref_logprobs"
"""Of `Trajectory.extras` under `reference.path=rollout`: log-probs [T] of the reference policy, float32."""

SUPPORT_COUNTS = "support_counts"
"""Of `Trajectory.extras` where sampling was truncated: int32 [N], of each sampled token how many tokens it was drawn
from: n > 0 are the next n of `support_ids`, 0 is the whole vocabulary, n < 0 are -n, the next row of `support_bits`."""
SUPPORT_IDS = "support_ids"
"""int32, ascending for each token."""
SUPPORT_BITS = "support_bits"
"""uint8 [rows, vocabulary / 8, rounded up], the first token of eight in the lowest bit; of supports that are smaller so
than as ids."""


TOPK_IDS = "topk_ids"
"""Of `Trajectory.extras` with `engine.record_topk`: int32 [N, k], the k likeliest tokens of the distribution that each
of N sampled tokens was drawn from, likeliest first."""
TOPK_LOGPROBS = "topk_logprobs"
"""float32 [N, k], their log-probs in it (not renormalised over the k); -inf where it has fewer."""


ROUTED_EXPERTS = "routed_experts"
"""Of `Trajectory.extras` with `learner.router_replay`: [S, layers, k], of each of the S tokens before the last sampled
one the experts that every mixture's layer sent it to when it was sampled from (see `Routers`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """Those of a mixture of experts."""

    layers: int
    """That have experts."""
    chosen: int
    """Experts of a layer that a token goes to."""
    experts: int
    """Of a layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of `ROUTED_EXPERTS`: the smallest that holds an expert's number."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.int16)


class DropReason(str, Enum):
    """Why a group left the ledger without being trained."""

    STALE = "stale"
    DEAD_BRANCH = "dead_branch"
    """Over-age since a resume went back behind the weights that sampled it; its prompt returns to the stream."""
    FAILED_GENERATION = "failed_generation"
    FAILED_REWARD = "failed_reward"
    FAILED_ENVIRONMENT = "failed_environment"
    """The user's environment raised, or made what cannot be trained on."""
    FILTERED_ZERO_VARIANCE = "filtered_zero_variance"
    OVER_LENGTH = "over_length"
    FILTERED = "filtered"
    """By a function of `rollout.filters`."""
    FAILED_FILTER = "failed_filter"
    """Such a function raised, or gave no answer that is one."""
    INCOMPLETE = "incomplete"
    """Not finished in time by any worker that was asked, or with too few members whatever was tried."""
    REJECTED = "rejected"
    WORKER_LOST = "worker_lost"
    SHUTDOWN = "shutdown"


REWARD_FAILURES = ("raised", "no_number", "timed_out", "exited", "lost", "environment")
"""Why a completion has no reward: its call raised, gave no finite number, passed its deadline, ended its process or
never reached one; or its environment failed."""


LOST_TOKENS = (
    "evaluation", "left_out", "refused",
    *(reason.value for reason in DropReason if reason.value.startswith(("failed_", "filtered", "incomplete"))),
)  # fmt: skip
"""What becomes of sampled tokens that no group at the replay server has. `left_out` are those of its groups that are in
no loss: a greedy baseline, what an environment leaves out. `refused` are of groups that came too late, or malformed."""


class StalePolicy(str, Enum):
    """What happens at lease time to tokens older than `max_staleness` (design: consumption gate)."""

    MASK = "mask"
    DROP = "drop"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task instance. `index` is its place in the endless, seeded stream of prompts."""

    index: int
    epoch: int
    """How often each row of its source has come before."""
    row: int
    """Of the data, from 0; with a mixture counted through all sources in their order."""
    token_ids: NDArray[np.int32]
    """[P] the prompt after chat template and tokenizer."""
    text: str
    source: str = ""
    """Name in `data.mixture`; empty without one."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The whole row of the data, `prompt` included; what the reward function is called with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float
    """0 is greedy; log-probs are then those of the argmax under temperature 1."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end a completion once one of them is written; it is the end of the completion, and in it."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together; 1 is all. After the two below."""
    top_k: int = 0
    """Draw from so many tokens, the likeliest; 0 is all. After the one below."""
    min_p: float = 0.0
    """Draw from tokens of at least this share of the likeliest one's probability; 0 is all."""

    record_topk: int = 0
    """So many of the likeliest tokens are recorded at each step (`TOPK_IDS`); 0 is none."""
    record_routing: bool = False
    """Whether the experts of each token are recorded (`ROUTED_EXPERTS`)."""

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary; the argmax needs none."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one sampled sequence."""

    token_ids: NDArray[np.int32]
    """[N], the stop token included when there was one."""
    logprobs: NDArray[np.float32]
    """[N] log-prob of each token under the distribution it was sampled from (temperature and truncation included)."""
    policy_versions: NDArray[np.int32]
    """[N] the version of the weights that sampled each token; non-decreasing."""
    finish_reason: str
    """`stop` or `length`."""
    trainable: bool = True
    """False where it was sampled at another temperature than the run's: the learner would compute other log-probs."""
    recorded: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Named arrays whose first axis grows with the tokens: what `Trajectory.extras` of that name is joined from. That
    of `ROUTED_EXPERTS` begins with the prompt, and ends before the last token: nothing was sampled from that."""


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
    """[T] prompt, then completion."""
    loss_mask: NDArray[np.bool_]
    """[T] true on sampled tokens; false on prompt and observation tokens."""
    behavior_logprobs: NDArray[np.float32]
    """[T] log mu of sampled tokens; 0 elsewhere."""
    policy_versions: NDArray[np.int32]
    """[T] version that sampled the token; NO_VERSION elsewhere."""
    reward: float
    rewards: dict[str, float] = field(default_factory=dict)
    """Named components, where the reward function returned them."""
    turn_rewards: tuple[float, ...] = ()
    """What each turn of the policy earned, an unbroken run of loss tokens being a turn; empty where nobody said. What
    `reward` has beyond their sum was earned by the last."""
    finish_reason: str = "stop"
    branch: bool = False
    """Whether it is one more conversation of the episode of the trajectory before it: both are the same member of their
    group, with one reward."""
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Named arrays of any shape that an environment attaches: log-probs of a teacher, an image, routed experts. They
    are stored and travel with the trajectory to the rank that trains it; the replay server looks into none but
    `ref_logprobs` and the `support_*`, `topk_*` and `routed_experts` that an engine recorded. Large ones are sent
    without a copy: nobody writes to an array once it is attached."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The sibling trajectories of one prompt: the unit of admission, storage and accounting."""

    group_id: int
    prompt_index: int
    attempt: int
    """From the assignment; an insert with an older attempt is fenced."""
    worker: str
    trajectories: tuple[Trajectory, ...]
    prompt_text: str = ""
    completion_texts: tuple[str, ...] = ()
    """[G] decoded completions; for `samples.jsonl`, never trained on."""
    started_at: float = 0.0
    finished_at: float = 0.0
    """Seconds since the epoch on the worker's clock; for metrics only."""
    lost: AsyncRLError | None = None
    """Why members are missing: what the last one failed with. Known where the group is made, never sent with it."""


@dataclass(frozen=True, slots=True)
class ExtraHeader:
    """One of `Trajectory.extras` without its bytes."""

    name: str
    dtype: str
    """As numpy writes it: `<f4`."""
    shape: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class TrajectoryHeader:
    """What the replay server and the batch planner know of a trajectory without touching its arrays.

    Nobody writes to it. It is not frozen: three processes make one of each trajectory, and a frozen one takes 2.5 times
    as long to make.
    """

    length: int
    prompt_length: int
    reward: float
    version_tokens: tuple[tuple[int, int], ...]
    """Runs `(policy_version, loss tokens sampled at it)` in token order."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named components, as in `Trajectory`: a baseline needs those of siblings on other ranks, or too old to train."""
    turn_rewards: tuple[float, ...] = ()
    """As in `Trajectory`."""
    finish_reason: str = "stop"
    branch: bool = False
    """As in `Trajectory`."""
    extras: tuple[ExtraHeader, ...] = ()
    """By name, in the order of their bytes."""

    @property
    def loss_tokens(self) -> int:
        runs = self.version_tokens
        return runs[0][1] if len(runs) == 1 else sum(count for _, count in runs)

    @property
    def earned(self) -> tuple[float, ...]:
        """`turn_rewards`, the last turn's with the rest of `reward`; empty where nobody said."""
        if not self.turn_rewards:
            return ()
        return (*self.turn_rewards[:-1], self.turn_rewards[-1] + self.reward - sum(self.turn_rewards))


def turns_in(loss_mask: NDArray[np.bool_]) -> int:
    """Turns of the policy: unbroken runs of loss tokens in a mask [T]."""
    return int(loss_mask[:1].sum()) + int(np.count_nonzero(loss_mask[1:] & ~loss_mask[:-1]))


def members_of(trajectories: Iterable[Trajectory | TrajectoryHeader]) -> list[int]:
    """[M] where each member of a group begins: what follows up to the next are its branches."""
    return [place for place, trajectory in enumerate(trajectories) if not trajectory.branch]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    group_id: int
    prompt_index: int
    attempt: int
    worker: str
    trajectories: tuple[TrajectoryHeader, ...]
    nbytes: int = 0
    """Size of the group's frames, for byte credits and the memory cap."""
    packed: bytes = field(default=b"", init=False, repr=False, compare=False)
    """Its bytes on the wire, once they were received or made (`replay.codec.headers`); a `replace` begins without."""

    @property
    def members(self) -> int:
        """Episodes: trajectories but for branches."""
        return len(members_of(self.trajectories))

    @property
    def member_rewards(self) -> list[float]:
        """[M]"""
        return [trajectory.reward for trajectory in self.trajectories if not trajectory.branch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """An order to a rollout worker: make this group. Held under a lease kept alive by heartbeats."""

    group_id: int
    prompt_index: int
    attempt: int
    """+1 at each re-issue of the same group."""
    seed: int
    policy_version: int
    """The published version when it was issued; the worker's engine serves it or is allowed to lag (see admission)."""
    single: bool = False
    """One member of a group that is admitted by sample: its id is the member's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One training batch, sealed: the same for every rank and every time `lease(step)` is asked again."""

    step: int
    policy_version: int
    """The version the learner will hold when it trains this step is this one, or its child when leased ahead."""
    groups: tuple[GroupHeader, ...]
    staleness: dict[int, int]
    """policy_version -> staleness at the moment of training, for every version in `groups`."""
    max_staleness: int
    """Loss tokens with a larger staleness are masked out by every rank."""
    shards: tuple[tuple[tuple[int, int], ...], ...]
    """Per rank, the `(group position, trajectory position)` pairs it trains, balanced on packed tokens."""

    @property
    def all_fresh(self) -> bool:
        """Whether no loss token is over the bound."""
        return max(self.staleness.values(), default=0) <= self.max_staleness

    def fresh_tokens(self, trajectory: TrajectoryHeader) -> int:
        """Loss tokens of `trajectory` that are within the bound."""
        staleness, bound, fresh = self.staleness, self.max_staleness, 0
        for version, tokens in trajectory.version_tokens:
            if staleness[version] <= bound:
                fresh += tokens
        return fresh

    def tokens_by_staleness(self) -> dict[int, int]:
        """Staleness -> loss tokens that are trained at it, in order of staleness; over-age ones are in none."""
        counts: dict[int, int] = {}
        for group in self.groups:
            for trajectory in group.trajectories:
                for version, tokens in trajectory.version_tokens:
                    age = self.staleness[version]
                    counts[age] = counts.get(age, 0) + tokens
        return {age: counts[age] for age in sorted(counts) if age <= self.max_staleness}
