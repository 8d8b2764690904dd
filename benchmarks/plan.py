"""How well does `asyncrl plan` predict the throughput, idle shares and staleness of a run?

    python -m benchmarks.plan [--steps 40] [--repeats 3] [--together 2]

Runs the real replay server, the workers' loops and their clients over real sockets. Engines and learner sleep instead
of computing, so that the processor has next to nothing to do. An engine takes 10 ms for a decode step and 0.5 ms more
for each sequence in it; completions are log-normal. Measurements of the first two settings give the costs
(`asyncrl.planner.calibration`) by which all settings are predicted. Every repeat runs all settings, `--together` at a
time. The answer has, for each setting, the measured and the predicted (`foretold`) medians of tokens trained per
second, idle shares of learner and workers, and mean staleness; and the difference in tokens/s as a share. Settings
marked `held` were not run while the planner was written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.engines.base import GenerateRequest
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.learner.batch.prefetch import LeasePrefetch
from asyncrl.pace import Pace
from asyncrl.planner.calibration import LENGTHS, calibrate, read_run
from asyncrl.planner.costs import Costs, Decode, Histogram, LogNormal
from asyncrl.planner.outcome import Measured, simulate
from asyncrl.planner.simulation import Setup
from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.serving import run_server
from asyncrl.rewards.score import Outcome, RewardScore
from asyncrl.rollout.groups.episode import EpisodeRunner, GroupShape
from asyncrl.rollout.groups.filters import Filters
from asyncrl.rollout.worker.report import WorkerReport
from asyncrl.rollout.worker.worker import RolloutWorker
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION, Completion, Prompt, SamplingParams
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.keys import some_keys
from benchmarks.parts.measuring import free_address, spawn

DECODE_S, SEQUENCE_S = 0.010, 0.0005
MEAN, SIGMA, LONGEST = 60, 0.6, 400
MAX_SEQUENCES, GROUP_SIZE = 32, 4
TOKEN_S, STEP_S = 0.0003, 0.1
SYNC_S, STALL_S = 0.08, 0.02
WARM_UP = 0.1


@dataclass(frozen=True)
class Case:
    workers: int
    depth: int
    in_flight: int
    groups: int = 4
    slower: float = 1.0
    """Factor on the learner's time."""

    @property
    def name(self) -> str:
        parts = f"workers={self.workers} depth={self.depth} in_flight={self.in_flight} groups={self.groups}"
        return parts + (f" learner*{self.slower:g}" if self.slower != 1 else "")

    @property
    def setup(self) -> Setup:
        settings = AdmissionSettings(
            groups_per_step=self.groups,
            group_size=GROUP_SIZE,
            max_staleness=8,
            pipeline_depth=self.depth,
            max_in_flight=self.in_flight,
        )
        slots = max(1, -(-self.in_flight // self.workers))
        return Setup(settings=settings, engines=self.workers, slots=slots, max_sequences=MAX_SEQUENCES, ranks=1)


def true_costs(case: Case) -> Costs:
    """Return the costs for which engines and learner sleep."""
    return Costs(
        decode=Decode(((1, DECODE_S + SEQUENCE_S), (MAX_SEQUENCES, DECODE_S + SEQUENCE_S * MAX_SEQUENCES))),
        lengths=LogNormal(MEAN, SIGMA, LONGEST, of_prompt=0.0),
        step_s=case.slower * STEP_S,
        token_s=case.slower * TOKEN_S,
        sync_s=SYNC_S,
        stall_s=STALL_S,
    )


CALIBRATED = (Case(2, 2, 4), Case(2, 2, 16))
FORETOLD = (Case(1, 0, 8), Case(1, 3, 16), Case(3, 1, 12), Case(2, 4, 8, slower=3.0))
HELD = (Case(2, 1, 6, groups=6), Case(3, 6, 24, slower=2.0))


class SleepingEngine:
    """An engine that sleeps. Each decode step advances all its sequences by a token, and takes longer with more of
    them."""

    max_length = 1 << 16

    def __init__(self) -> None:
        self.version, self.generated, self._pause = 0, 0, 0.0
        self._pace = Pace()
        self._running: list[tuple[list[int], int, asyncio.Future[list[int]]]] = []
        self._waiting: list[tuple[int, asyncio.Future[list[int]]]] = []
        self._work = asyncio.Event()

    def stats(self) -> dict[str, float]:
        return {"generated_tokens": float(self.generated)} | self._pace.named("decode")

    def load(self, version: int) -> None:
        self.version, self._pause = version, STALL_S

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        random = np.random.default_rng(request.seed)
        logs = math.log(MEAN) - SIGMA**2 / 2 + SIGMA * random.standard_normal(request.n)
        lengths = np.clip(np.rint(np.exp(logs)), 1, LONGEST).astype(int).tolist()
        futures = [asyncio.get_running_loop().create_future() for _ in lengths]
        self._waiting += zip(lengths, futures, strict=True)
        self._work.set()
        found = await asyncio.gather(*futures)
        return [
            Completion(
                token_ids=np.full(len(versions), 65, np.int32),
                logprobs=np.full(len(versions), -0.5, np.float32),
                policy_versions=np.array(versions, np.int32),
                finish_reason="stop",
            )
            for versions in found
        ]

    async def run(self) -> None:
        """waits for: sequences; unblocked by: `generate`. Sleeps until absolute times, so that it makes up delays."""
        at = ended = time.monotonic()
        while True:
            while self._waiting and len(self._running) < MAX_SEQUENCES:
                length, future = self._waiting.pop(0)
                self._running.append(([], length, future))
            if not self._running:
                self._work.clear()
                await self._work.wait()
                at = ended = time.monotonic()
                continue
            pause, self._pause = self._pause, 0.0
            at += DECODE_S + SEQUENCE_S * len(self._running) + pause
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            before, ended = ended, time.monotonic()
            self._pace.add(len(self._running), ended - before - pause)
            self.generated += len(self._running)
            for versions, length, future in self._running:
                versions.append(self.version)
                if len(versions) == length:
                    future.set_result(versions)
            self._running = [each for each in self._running if len(each[0]) < each[1]]


class Prompts:
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index=index, epoch=0, row=0, token_ids=np.array([65, 66], np.int32), text="AB")


async def score(completions: list[str], row: dict[str, Any], **_: Any) -> list[Outcome]:
    return [RewardScore(value=0.0) for _ in completions]


async def work(config: ReplayConfig, name: str, slots: int) -> None:
    """Run a worker until the server says stop."""
    engine, report = SleepingEngine(), WorkerReport()
    report.add(engine.stats)
    client = RolloutClient(config.address, worker=name, run_digest="d", config=config, stats=report)
    runner = EpisodeRunner(
        engine=engine,
        environment=SingleTurn(),
        decode=lambda sequences, **_: ["A"] * len(sequences),
        encode=lambda text: np.array([65], np.int32),
        score=score,
        stepped=lambda: None,
        sampled=report.sampled,
    )
    worker = RolloutWorker(
        name=name,
        replay=client,
        runner=runner,
        prompts=Prompts(),  # pyright: ignore[reportArgumentType]
        evaluations={},
        check=lambda: None,
        proven=lambda: True,
        filters=Filters(),
        shape=GroupShape(size=GROUP_SIZE, fewest=GROUP_SIZE, tries=1),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=LONGEST),
        slots=slots,
        wait_timeout_s=300.0,
        report=report,
    )

    async def serve() -> None:
        """waits for: the next version; unblocked by: the learner's announcement, or the end."""
        revision = 0
        while True:
            board = await asyncio.to_thread(client.rendezvous().watch, revision, 5.0)
            if board.revision == revision:
                continue
            revision = board.revision
            await asyncio.sleep(board.values["sync_s"])
            engine.load(board.values["version"])
            await asyncio.to_thread(client.rendezvous().served, board.values["version"], "f")

    helpers = [asyncio.create_task(engine.run()), asyncio.create_task(serve())]
    report.start_clocks()
    await worker.run()
    for helper in helpers:
        helper.cancel()
    await client.close()


def run_workers(config: ReplayConfig, workers: int, slots: int) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*(work(config, f"w{number}", slots) for number in range(workers)))

    asyncio.run(all_of_them())


def serve(config: ReplayConfig, settings: AdmissionSettings) -> None:
    run_server(config, settings, "bench", "d", 0)


def run(case: Case, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Run `case` for real. Returns the rows of its metrics, and writes its lengths to the file where a run does."""
    folder.mkdir(parents=True)
    setup = case.setup
    config = ReplayConfig(address=free_address(), keys=some_keys(), max_staleness=8, pipeline_depth=case.depth)
    config.durability, config.heartbeat_s = "memory", 0.2
    server = spawn.Process(target=serve, args=(config, setup.settings), daemon=True)
    workers = spawn.Process(target=run_workers, args=(config, case.workers, setup.slots), daemon=True)
    server.start()
    learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
    try:
        learner.publish(
            policy_version=learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_version,
            parent=NO_VERSION,
        )
        learner.announce({"version": 0, "sync_s": 0.0})
        workers.start()
        rows = train(learner, case, steps, folder)
        learner.finish()
        workers.join(60)
    finally:
        learner.close()
        for process in (workers, server):
            process.join(20)
            process.kill()
    return rows


def train(learner: LearnerClient, case: Case, steps: int, folder: Path) -> list[dict[str, Any]]:
    leases = LeasePrefetch(learner, rank=0, world=1, wait_s=300.0)
    rows, lengths, before = list[dict[str, Any]](), list[int](), time.monotonic()
    for step in range(steps):
        waited = time.monotonic()
        lease = leases.take(step)
        trained_from = time.monotonic()
        if step + 1 < steps:
            leases.ask(step + 1)
        mine = [trajectory.loss_tokens for group in lease.plan.groups for trajectory in group.trajectories]
        lengths += mine
        time.sleep(case.slower * (STEP_S + TOKEN_S * sum(mine)))
        reply = learner.trained(step=step, policy_version=step + 1)
        learner.announce({"version": step + 1, "sync_s": SYNC_S})
        now = time.monotonic()
        row = {
            "step": step + 1,
            "time/step": now - before,
            "time/wait_batch": trained_from - waited,
            # Tokens that are too old cost the learner as much, though they have no gradient: they do not count.
            "perf/trained_tokens_per_s": sum(lease.plan.tokens_by_staleness().values()) / (now - before),
            "weights/update_s": SYNC_S,
            "weights/stall_s": STALL_S,
        }
        rows.append(dict(reply.metrics) | row)
        before = now
        learner.commit(step=step)
    counts, edges = np.histogram(lengths, 64)
    line = {"step": steps, LENGTHS: {"edges": edges.tolist(), "counts": counts.tolist()}}
    (folder / "histograms.jsonl").write_text(json.dumps(line) + "\n")
    return rows


def middle(found: Sequence[Measured]) -> dict[str, float]:
    names = ("tokens_per_s", "learner_idle", "rollout_idle", "staleness_mean")
    return {name: statistics.median(getattr(each, name) for each in found) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--together", type=int, default=2)
    given = parse(parser, {"steps": 8, "repeats": 1, "together": 3})
    cases = (*CALIBRATED, *FORETOLD, *HELD)
    cases = (*CALIBRATED, FORETOLD[0]) if given.smoke else cases
    seen: dict[Case, list[Any]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.together) as threads:
        for repeat in range(given.repeats):
            places = {case: Path(folder) / f"{repeat}-{number}" for number, case in enumerate(cases)}
            futures = {case: threads.submit(run, case, given.steps, place) for case, place in places.items()}
            for case, future in futures.items():
                seen[case].append(read_run(places[case], case.setup, future.result()))
        unknown = Costs(decode=Decode(((1, 0.1),)), lengths=Histogram((1.0, 2.0), (1.0,)))
        costs = calibrate([measured for case in CALIBRATED for measured in seen[case]], unknown)
    rows: dict[str, Any] = {}
    for case in cases:
        measured = middle([each.found() for each in seen[case]])
        mine = replace(costs, step_s=costs.step_s * case.slower, token_s=costs.token_s * case.slower)
        warm_up = max(1, math.ceil(WARM_UP * given.steps))
        runs = [simulate(case.setup, mine, steps=given.steps, warm_up=warm_up, seed=seed) for seed in range(3)]
        foretold = middle(runs)
        rows[f"{'held: ' if case in HELD else ''}{case.name}"] = {
            **{name: round(value, 3) for name, value in measured.items()},
            **{f"{name}_foretold": round(value, 3) for name, value in foretold.items()},
            "tokens_per_s_off": round(foretold["tokens_per_s"] / measured["tokens_per_s"] - 1, 3),
        }
    steps = {f"step_s_at_{batch}": round(costs.decode.step_s(batch), 4) for batch in (1, 16, 32)}
    answer("plan", {"steps": given.steps, **steps, **rows}, smoke=given.smoke)


if __name__ == "__main__":
    main()
