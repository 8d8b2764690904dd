"""A scripted replay and other fakes, for tests of the worker loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.checks.sources import Source
from asyncrl.data.dataset import Dataset, open_alone
from asyncrl.data.prompts import PromptSource
from asyncrl.engines.fake import FakeEngine
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import RewardError
from asyncrl.evaluation.orders import EvalAssignment, EvalResult
from asyncrl.quickstart.byte_tokenizer import EOS_ID, byte_tokenizer
from asyncrl.replay.protocol import Acquired, Board, DroppedSample, InsertReply
from asyncrl.rewards.score import RewardScore
from asyncrl.rollout.groups.episode import EpisodeRunner, GroupShape
from asyncrl.rollout.groups.evaluated import EvaluatedSet
from asyncrl.rollout.groups.filters import Filters
from asyncrl.rollout.rewards.parts import RewardParts
from asyncrl.rollout.rewards.watch import RewardWatch
from asyncrl.rollout.worker.report import WorkerReport
from asyncrl.rollout.worker.worker import RolloutWorker
from asyncrl.types import Assignment, DropReason, SamplingParams, TrajectoryGroup

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=(EOS_ID,))


class ByteTokenizer:
    """The byte tokenizer with the methods of a Hugging Face one that the rollout uses."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text).ids

    def render(self, messages: Any, tools: Any = ()) -> list[int]:
        raise NotImplementedError

    def decode(self, sequences, *, special: bool = False) -> list[str]:
        return self._tokenizer.decode_batch([ids.tolist() for ids in sequences], skip_special_tokens=not special)


class PromptTokenizer(ByteTokenizer):
    """The same as a prompt source takes it: one sequence at a time."""

    def decode(self, ids: list[int]) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def encode_bytes(text: str) -> NDArray[np.int32]:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


class ScriptedReplay:
    """Assigns `total` groups and the given evaluations, and sends stop once all have come back."""

    def __init__(self, total: int, evaluations: list[EvalAssignment] | None = None) -> None:
        self.total = total
        self.issued = 0
        self.evaluations = list(evaluations or [])
        self.open_evaluations = len(self.evaluations)
        self.inserted: list[TrajectoryGroup] = []
        self.failed: list[tuple[Assignment, DropReason, str]] = []
        self.samples: list[DroppedSample] = []
        self.results: list[EvalResult] = []
        self.surveyed: tuple[int, ...] | None = None
        self.asked: list[int] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.changed = asyncio.Event()
        self.insert_status = "accepted"

    async def acquire(self, *, slots: int, wait_s: float) -> Acquired:
        self.asked.append(slots)
        await asyncio.sleep(0)
        if self.evaluations and self.open_evaluations == len(self.evaluations):  # one at a time, as the server does
            return Acquired(evaluations=(self.evaluations.pop(),))
        if len(self.inserted) + len(self.failed) >= self.total and not self.open_evaluations:
            return Acquired(stop=True)
        count = min(slots, self.total - self.issued)
        if not count:
            self.changed.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self.changed.wait()
            except TimeoutError:
                pass
            return Acquired(waiting_for="the test")
        first, self.issued = self.issued, self.issued + count
        self.in_flight += count
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return Acquired(assignments=tuple(assignment(index) for index in range(first, first + count)))

    async def insert(self, group: TrajectoryGroup, lost: DroppedSample | None = None) -> InsertReply:
        await asyncio.sleep(0)
        self.samples += [] if lost is None else [lost]
        self.in_flight -= 1
        self.inserted.append(group)
        self.changed.set()
        return InsertReply(status=self.insert_status)

    async def survey(self, rows: Sequence[int]) -> None:
        self.surveyed = tuple(rows)

    async def fail(
        self,
        assignment: Assignment,
        reason: DropReason,
        detail: str,
        rewards: Sequence[float] = (),
        sample: DroppedSample | None = None,
    ) -> None:
        self.in_flight -= 1
        self.failed.append((assignment, reason, detail))
        self.samples += [] if sample is None else [sample]
        self.changed.set()

    async def report_evaluation(self, result: EvalResult) -> None:
        self.open_evaluations -= 1
        self.results.append(result)
        self.changed.set()

    async def served(self, policy_version: int, fingerprint: str) -> None: ...

    async def watch(self, *, revision: int, wait_s: float) -> Board:
        raise NotImplementedError

    async def close(self) -> None: ...


def assignment(index: int) -> Assignment:
    return Assignment(group_id=100 + index, prompt_index=index, attempt=1, seed=index * 7, policy_version=0)


async def reward_length(texts: list[str], row: dict[str, Any], **_: Any) -> list[RewardScore]:
    if row.get("bad"):
        raise RewardError(f"row {row['n']} is bad")
    return [RewardScore(value=float(len(text)), parts={"letters": float(len(text))}) for text in texts]


def rows_file(path: Path, count: int, bad: tuple[int, ...] = ()) -> Path:
    rows = ({"prompt": f"{n}>", "n": n, "bad": n in bad} for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dataset(path: Path) -> Dataset:
    return open_alone(Source(key="data.path", specs=(str(path),)))


def prompt_source(path: Path, max_prompt_tokens: int = 32, overlong: str = "error") -> PromptSource:
    settings = {"max_prompt_tokens": max_prompt_tokens, "overlong": overlong}
    return PromptSource(dataset(path), PromptTokenizer(), seed=0, shuffle=False, **settings)


def make_worker(replay: Any, path: Path, **changes: Any) -> RolloutWorker:
    """Return a worker on a fake engine that serves version 0, unless `engine` is given."""
    engine = changes.pop("engine", None)
    if engine is None:
        engine = FakeEngine(vocabulary=128)
        engine.load_weights(0, {})
    report = changes.pop("report", WorkerReport())
    report.add(engine.stats)
    runner = EpisodeRunner(
        engine=engine,
        environment=changes.pop("environment", SingleTurn()),
        decode=ByteTokenizer().decode,
        encode=encode_bytes,
        score=changes.pop("score", reward_length),
        parts=changes.pop("parts", RewardParts()),
        stepped=lambda: report.count("environment_steps"),
        sampled=report.sampled,
        watch=changes.pop("watch", RewardWatch()),
        accuracy=changes.pop("accuracy", False),
    )
    held_out = prompt_source(path, changes.pop("max_evaluation_tokens", 32))
    known = {"heldout": EvaluatedSet(rows=held_out, sampling=replace(SAMPLING, temperature=0.0))}
    settings = {
        "name": "rollout-0",
        "replay": replay,
        "runner": runner,
        "prompts": prompt_source(path, changes.pop("max_prompt_tokens", 32), changes.pop("overlong", "error")),
        "evaluations": {
            name: partial(runner.run_evaluation, given=given) for name, given in changes.pop("evaluated", known).items()
        },
        "check": lambda: None,
        "proven": lambda: True,
        "filters": Filters(),
        "shape": GroupShape(size=4, fewest=4, tries=1),
        "sampling": SAMPLING,
        "slots": 16,
        "wait_timeout_s": 60.0,
        "report": report,
    }
    return RolloutWorker(**{**settings, **changes})
