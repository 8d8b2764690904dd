"""Encodes headers of groups, by which the gates judge them, and plans; decoding checks every field."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from asyncrl.errors import WireError
from asyncrl.replay.codec import wire
from asyncrl.types import ExtraHeader, GroupHeader, StepPlan, TrajectoryHeader

_Rare = tuple[tuple[ExtraHeader, ...], bool, tuple[float, ...]]
"""`(extras, branch, turn rewards)`."""
_NOTHING_RARE: _Rare = ((), False, ())


def encode_group_header(header: GroupHeader) -> list[Any]:
    """Return `[worker, packed]`. `packed` is made once, however often the header is sent, journalled or sealed."""
    return [header.worker, packed_header(header)]


def packed_header(header: GroupHeader) -> bytes:
    """Pack all but the name of the worker, which each server fills in: one column per field of the trajectories.

    The runs of all trajectories are two columns, plus one with the number of runs of each. Named rewards are left out
    if no trajectory has any; rare fields (extras, branch, turn rewards) are a row for each trajectory that has some.
    """
    if not header.packed:
        facts = header.trajectories
        runs = [run for each in facts for run in each.version_tokens]
        columns = [
            [each.length for each in facts],
            [each.prompt_length for each in facts],
            [each.reward for each in facts],
            [each.finish_reason for each in facts],
            [len(each.version_tokens) for each in facts],
            [version for version, _ in runs],
            [count for _, count in runs],
            [each.rewards for each in facts] if any(each.rewards for each in facts) else [],
            [row for place, each in enumerate(facts) for row in _rare_row(place, each)],
        ]
        _keep_packed(header, wire.pack([header.group_id, header.prompt_index, header.attempt, header.nbytes, *columns]))
    return header.packed


def _keep_packed(header: GroupHeader, packed: bytes) -> None:
    object.__setattr__(header, "packed", packed)  # the dataclass is frozen; its content does not change


def _rare_row(place: int, facts: TrajectoryHeader) -> list[list[Any]]:
    if not (facts.extras or facts.branch or facts.turn_rewards):
        return []
    extras = [[extra.name, extra.dtype, list(extra.shape)] for extra in facts.extras]
    return [[place, extras, int(facts.branch), list(facts.turn_rewards)]]


def decode_group_header(value: Any, worker: str | None = None) -> GroupHeader:
    """Decode `[worker, packed]`; `worker`, if given, replaces the name in it. Raises WireError; see the checks."""
    told, packed = wire.sequence(value, "group header", 2)
    told = wire.text(told, "worker", wire.MAX_NAME)
    if type(packed) is not bytes:
        raise WireError(f"a group header must be packed bytes, not {wire.short(packed)}")
    fields = wire.sequence(wire.unpack(packed, max_bytes=wire.MAX_REPLY_BYTES), "packed group header", 13)
    group_id, prompt_index, attempt, nbytes, lengths, prompts, rewards, reasons, *others = fields
    runs, versions, counts, parts, rare = others
    size = len(wire.sequence(lengths, "trajectories", limit=wire.MAX_TRAJECTORIES))
    if not size:
        raise WireError("a group has at least one trajectory")
    wire.integers(lengths, "length", 1, wire.MAX_TOKENS)
    wire.integers(prompts, "prompt_length", 0, wire.MAX_TOKENS, size)
    total = sum(wire.integers(runs, "number of runs", 0, wire.MAX_TOKENS, size))
    wire.integers(versions, "policy_version", 0, wire.MAX_VERSION, total)
    wire.integers(counts, "run length", 1, wire.MAX_TOKENS, total)
    pairs = zip(versions, counts, strict=True)
    trajectories = tuple(
        map(
            _decode_trajectory,
            lengths,
            prompts,
            (tuple(itertools.islice(pairs, some)) for some in runs),
            _numbers(rewards, "reward", size),
            _texts(reasons, "finish_reason", size),
            _decode_parts(parts, size),
            _decode_rare(rare, size, rewards),
        )
    )
    _check_branches(trajectories)
    header = GroupHeader(
        group_id=wire.integer(group_id, "group_id", 0, wire.MAX_ID),
        prompt_index=wire.integer(prompt_index, "prompt_index", 0, wire.MAX_ID),
        attempt=wire.integer(attempt, "attempt", 0, wire.MAX_VERSION),
        worker=told if worker is None else worker,
        nbytes=wire.integer(nbytes, "nbytes", 0, wire.MAX_ID),
        trajectories=trajectories,
    )
    _keep_packed(header, packed)
    return header


def _numbers(value: Any, name: str, size: int) -> list[float]:
    items = wire.sequence(value, name, size)
    if set(map(type, items)) != {float} or not math.isfinite(sum(items)):  # a sum of finite values may overflow, too
        return [wire.number(item, name) for item in items]
    return items


def _texts(value: Any, name: str, size: int) -> list[str]:
    items = wire.sequence(value, name, size)
    if set(map(type, items)) != {str} or max(map(len, items)) > wire.MAX_NAME:
        return [wire.text(item, name, wire.MAX_NAME) for item in items]
    return items


def _decode_parts(value: Any, size: int) -> list[dict[str, float]]:
    if value == []:
        return [{} for _ in range(size)]
    maps = [wire.mapping(each, "rewards") for each in wire.sequence(value, "rewards", size)]
    return [{name: wire.number(part, "rewards") for name, part in each.items()} for each in maps]


def _decode_rare(value: Any, size: int, rewards: Sequence[Any]) -> list[_Rare]:
    """Raises WireError, also for an empty row, or two rows of one trajectory."""
    found = [_NOTHING_RARE] * size
    for row in wire.sequence(value, "rare", limit=size):
        place, extras, branch, earned = wire.sequence(row, "rare row", 4)
        place = wire.integer(place, "trajectory", 0, size - 1)
        turn_rewards = wire.turn_numbers(wire.sequence(earned, "turn rewards", limit=wire.MAX_TOKENS), rewards[place])
        rare = wire.decode_extra_headers(extras), bool(wire.integer(branch, "branch", 0, 1)), turn_rewards
        if found[place] is not _NOTHING_RARE or rare == _NOTHING_RARE:
            raise WireError(f"trajectory {place} has an empty row of rare fields, or a second one")
        found[place] = rare
    return found


def _decode_trajectory(
    length: int,
    prompt_length: int,
    runs: tuple[tuple[int, int], ...],
    reward: float,
    finish_reason: str,
    rewards: dict[str, float],
    rare: _Rare,
) -> TrajectoryHeader:
    """Raises WireError if the fields do not agree."""
    extras, branch, turn_rewards = rare
    total = runs[0][1] if len(runs) == 1 else sum([count for _, count in runs])
    if total > length - prompt_length:
        raise WireError(f"{total} loss tokens do not fit in a completion of {length - prompt_length}")
    if turn_rewards and len(turn_rewards) > min(total, length - prompt_length - total + 1):
        raise WireError(
            f"{len(turn_rewards)} turns, separated from each other, do not fit in a completion of "
            f"{length - prompt_length} with {total} loss tokens"
        )
    return TrajectoryHeader(
        length=length,
        prompt_length=prompt_length,
        reward=reward,
        version_tokens=runs,
        rewards=rewards,
        finish_reason=finish_reason,
        turn_rewards=turn_rewards,
        branch=branch,
        extras=extras,
    )


def _check_branches(trajectories: Sequence[TrajectoryHeader]) -> None:
    """Raises WireError for a branch that belongs to no episode, or not to the one before it."""
    for place, each in enumerate(trajectories):
        if not each.branch:
            continue
        before = trajectories[place - 1] if place else None
        if before is None or (before.reward, before.rewards) != (each.reward, each.rewards):
            raise WireError("a branch must come after the first trajectory of its episode and have the same reward")


def encode_plan(plan: StepPlan) -> list[Any]:
    """Encode a plan. Each shard is a flat list of group and trajectory positions."""
    groups = [encode_group_header(group) for group in plan.groups]
    shards = [[part for place in shard for part in place] for shard in plan.shards]
    staleness = wire.flatten_runs(tuple(plan.staleness.items()))
    return [plan.step, plan.policy_version, plan.max_staleness, staleness, shards, groups]


def decode_plan(value: Any) -> StepPlan:
    """Raises WireError, also if a shard names a trajectory that does not exist, or one is in two shards."""
    step, policy_version, max_staleness, flat, shards, groups = wire.sequence(value, "step plan", 6)
    headers = tuple(map(decode_group_header, wire.sequence(groups, "groups")))
    ages = wire.integers(flat, "staleness", 0, wire.MAX_VERSION)
    sizes = [len(header.trajectories) for header in headers]
    places = [_decode_shard(shard, sizes) for shard in wire.sequence(shards, "shards")]
    if len(set(itertools.chain(*places))) != sum(map(len, places)):
        raise WireError("a trajectory is assigned to two shards")
    return StepPlan(
        step=wire.integer(step, "step", 0, wire.MAX_ID),
        policy_version=wire.integer(policy_version, "policy_version", 0, wire.MAX_VERSION),
        max_staleness=wire.integer(max_staleness, "max_staleness", 0, wire.MAX_VERSION),
        staleness=dict(zip(ages[::2], ages[1::2], strict=False)),
        shards=tuple(places),
        groups=headers,
    )


def _decode_shard(value: Any, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    flat = wire.integers(value, "shard place", 0, wire.MAX_TOKENS)
    if len(flat) % 2:
        raise WireError(f"a shard must be a list of pairs of group and trajectory, not {len(flat)} numbers")
    places = tuple(zip(flat[::2], flat[1::2], strict=True))
    for group, position in places:
        if group >= len(sizes) or position >= sizes[group]:
            raise WireError(f"a shard names trajectory {position} of group {group}, which does not exist")
    return places
