"""Rows of samples.jsonl say which tokens were learned, which were read, and which came too late."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.learner.reporting.samples import Samples
from asyncrl.quickstart.byte_tokenizer import byte_tokenizer, save_byte_tokenizer
from asyncrl.rollout.worker.tokenizer import make_encode
from asyncrl.types import NO_VERSION, StepPlan, Trajectory, TrajectoryGroup
from tests.chat import spaced

PLAN = StepPlan(step=0, policy_version=9, groups=(), staleness={9: 0, 8: 1, 5: 4}, max_staleness=2, shards=())


def group(*parts: tuple[str, int], encoded: Mapping[str, NDArray[np.int32]] | None = None) -> TrajectoryGroup:
    """Of one trajectory: `(text, version)` in turn, the first its prompt; by the byte tokenizer, or as `encoded`."""
    ids = [byte_tokenizer().encode(text).ids if encoded is None else encoded[text] for text, _ in parts]
    versions = np.concatenate([np.full(len(each), version) for each, (_, version) in zip(ids, parts, strict=True)])
    trajectory = Trajectory(
        token_ids=np.concatenate(ids).astype(np.int32),
        loss_mask=versions != NO_VERSION,
        behavior_logprobs=np.zeros(len(versions), np.float32),
        policy_versions=versions.astype(np.int32),
        reward=1.0,
    )
    text = "".join(text for text, _ in parts[1:])
    return TrajectoryGroup(
        group_id=0, prompt_index=0, attempt=0, worker="w", trajectories=(trajectory,), completion_texts=(text,)
    )


def test_segments_are_what_was_learned_what_was_read_and_what_was_too_old(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    samples = Samples(str(tmp_path))
    (plain,) = samples.rows(PLAN, [group(("p>", NO_VERSION), ("ab", 8), ("c", 9))], 4)
    ages = {"version_min": 8, "version_max": 9, "staleness_min": 0, "staleness_max": 1}
    assert plain.items() >= ages.items() and plain["completion"] == "abc"
    assert "segments" not in plain and "dropped" not in plain, "all of it was learned"
    turns = group(("p>", NO_VERSION), ("old", 5), ("ask", 8), ("told", NO_VERSION), ("say", 9))
    (several,) = samples.rows(PLAN, [turns], 4)
    assert several["segments"] == [["stale", "old"], ["learned", "ask"], ["read", "told"], ["learned", "say"]]
    assert several["staleness_max"] == 4 and "dropped" not in several
    (late,) = samples.rows(PLAN, [group(("p>", NO_VERSION), ("late", 5))], 4)
    assert (late["dropped"], late["segments"]) == ("stale", [["stale", "late"]])


def test_segments_of_a_tokenizer_that_decodes_without_the_first_space_lose_none(tmp_path: Path) -> None:
    of = spaced.tokenizer("legacy")
    of.save_pretrained(tmp_path)
    ids = {text: np.array(make_encode(of)(text)) for text in ("f:", "hello", " ab", "    4")}
    turns = group(*zip(ids, (NO_VERSION, 9, NO_VERSION, 5), strict=True), encoded=ids)
    (row,) = Samples(str(tmp_path)).rows(PLAN, [turns], 4)
    assert row["segments"] == [["learned", "hello"], ["read", " ab"], ["stale", "    4"]]


@pytest.mark.parametrize("broken", ["", '{"a":', '{"version": "1.0", "model": {"type": "Odd"}}'])
def test_without_a_tokenizer_rows_have_all_else(broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if broken:  # transformers says so by a KeyError, among others
        save_byte_tokenizer(tmp_path / "none")
        (tmp_path / "none" / "tokenizer.json").write_text(broken)
    turns = group(("p>", NO_VERSION), ("a", 9), ("b", NO_VERSION), ("c", 9))
    with caplog.at_level(logging.WARNING):
        rows = Samples(str(tmp_path / "none")).rows(PLAN, [turns, turns], 4)
    assert [("segments" in row, row["completion"], row["staleness_max"]) for row in rows] == [(False, "abc", 0)] * 2
    assert caplog.text.count("no tokenizer here") == 1
