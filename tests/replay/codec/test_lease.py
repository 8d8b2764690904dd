"""Members of a group that came one by one are handed out as the group that the plan shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.replay.codec.group import StoredGroup, encode_group, split_frames
from asyncrl.replay.codec.lease import Unpacking, pack_places
from asyncrl.replay.core.durable.siblings import joined
from asyncrl.types import Assignment, StepPlan, TrajectoryGroup
from tests.replay.helpers import group, same_trajectory

LONG = 70_000
"""Tokens of a trajectory whose arrays have frames of their own."""


def member(number: int, tokens: int, branches: int = 0) -> TrajectoryGroup:
    order = Assignment(group_id=number, prompt_index=number // 4, attempt=0, seed=0, policy_version=0, single=True)
    made = group(order, [0] * tokens, size=1 + branches)
    first, *others = made.trajectories
    others = [replace(each, branch=True) for each in others]
    return replace(made, trajectories=(first, *others), started_at=float(number), finished_at=float(10 - number))


def stored(made: TrajectoryGroup) -> StoredGroup:
    encoded = encode_group(made)
    return split_frames(encoded.header, encoded.frames)


@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_gets_its_trajectories_and_rank_0_whole_samples(world: int) -> None:
    """Short and long ones, with branches, extras and a member lost; one group came whole."""
    groups = [
        [member(0, 3), member(1, LONG), member(3, 5, branches=2)],
        [group(Assignment(group_id=8, prompt_index=2, attempt=0, seed=0, policy_version=0), [0] * 4, size=4)],
        [member(12, 9), member(13, 2), member(14, 7), member(15, 1)],
    ]
    headers = tuple(joined([encode_group(part).header for part in parts]) for parts in groups)
    places = [(g, t) for g, header in enumerate(headers) for t in range(len(header.trajectories))]
    shards = tuple(tuple(places[rank::world]) for rank in range(world))
    plan = StepPlan(step=0, policy_version=0, groups=headers, staleness={0: 0}, max_staleness=1, shards=shards)
    kept = {g: [stored(part) for part in parts] for g, parts in enumerate(groups)}
    sent = [[trajectory for part in parts for trajectory in part.trajectories] for parts in groups]
    for rank in range(world):
        sampled = [0, 2] if rank == 0 else []
        parcel, frames = pack_places(kept, shards[rank], sampled)
        unpacking = Unpacking(plan)
        unpacking.open(parcel, [bytes(frame) for frame in frames])
        lease = unpacking.lease(rank)
        assert lease.trajectories.keys() == set(shards[rank])
        for (g, t), arrived in lease.trajectories.items():
            assert same_trajectory(sent[g][t], arrived)
        assert [sample.group_id for sample in lease.samples] == [0, 12][: len(sampled)]
        for sample, g in zip(lease.samples, sampled, strict=True):
            texts = [text for part in groups[g] for text in part.completion_texts]
            assert (sample.prompt_text, list(sample.completion_texts)) == ("what?", texts)
            assert (sample.started_at, sample.finished_at) == (groups[g][0].group_id, 10 - groups[g][0].group_id)
            for mine, its in zip(sample.trajectories, sent[g], strict=True):
                assert np.array_equal(mine.token_ids, its.token_ids) and mine.reward == its.reward
