"""The processes of the chaos run with real engines: a learner, and workers, one of which has a trap."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.engines.base import OwnProcesses
from asyncrl.engines.factory import make_engine
from asyncrl.engines.vllm import settings as vllm_settings
from asyncrl.schema import Config
from asyncrl.types import NO_VERSION, Completion
from asyncrl.weights.broadcast import protocol
from asyncrl.weights.broadcast import publisher as broadcast_publisher
from asyncrl.weights.broadcast import subscriber as broadcast_subscriber
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.staging import Staging
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.canary import Canary, Proof, random_probes
from asyncrl.weights.publishing.publisher import WeightPublisher
from tests.vllm.models import VOCABULARY, logprobs_of, make_model, prompt, request
from tests.vllm.trapped_calls import TrappedCalls
from tests.weights.board import WorkerRendezvous
from tests.weights.trap import Injection, Trap

PAUSE_S = 0.3
BUCKET = 1 << 16
PROBES = random_probes(VOCABULARY, seed=0)
TOLERANCE = 1e-3
DIFFERENT = 4
"""Number of models; the versions cycle through them."""


@cache
def model_of(version: int) -> torch.nn.Module:
    return make_model("qwen3", 1 + version % DIFFERENT)


@cache
def expected(version: int) -> tuple[np.ndarray, ...]:
    """Return the log-probs of the probes under the plain model of this version."""
    return tuple(logprobs_of(model_of(version), ids) for ids in PROBES)


class LoadTrap(Trap):
    """A trap that also covers the steps of a load within vLLM, if the engine has them."""

    def around_load(self, engine: Any) -> None:
        load = engine._load_staged

        async def trapped(version: int) -> None:
            self.at("paused")
            await load(version)
            self.at("loaded")

        engine._load_staged = trapped


class TrappedReceiver:
    def __init__(self, inner: Any, trap: Trap) -> None:
        self._inner, self._trap = inner, trap

    def receive(self, event: Any) -> list[str]:
        self._trap.at("before receive")
        begin = self._inner._begin if hasattr(self._inner, "_begin") else None
        if begin is not None:

            def trapped(kind: str, payload: dict[str, Any]) -> None:
                begin(kind, payload)
                self._trap.at("staging")

            self._inner._begin = trapped
        try:
            return self._inner.receive(event)
        finally:
            if begin is not None:
                self._inner._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Witness:
    """Queries the engine all the time, as rollouts would, and notes every answer that matches no version."""

    def __init__(self, board: Any, worker: str, engine: Any) -> None:
        self._board, self._worker, self._engine = board, worker, engine
        self.error: Exception | None = None
        threading.Thread(target=self._main, daemon=True).start()

    def _main(self) -> None:
        try:
            number = 0
            while True:
                number += 1
                if self._engine.policy_version == NO_VERSION:
                    time.sleep(0.02)
                    continue
                self._score()
                self._generate(number)
        except Exception as error:  # thread boundary: the worker raises it and ends, as with a failed group
            self.error = error

    def _score(self) -> None:
        before = self._engine.policy_version
        scores = self._engine.score(PROBES)
        versions = range(before, self._engine.policy_version + 1)
        for i, found in enumerate(scores):
            if not any(np.abs(found - expected(version)[i]).max() < TOLERANCE for version in versions):
                self._board.note("mixed", (self._worker, "score", list(versions)))
        self._board.note(f"answers/{self._worker}", len(scores))

    def _generate(self, number: int) -> None:
        completions = asyncio.run(self._engine.generate(request(prompt(9, number), 2, new=16)))
        for completion in completions:
            first = int(completion.policy_versions[0])
            if self._distance(first, prompt(9, number), completion) > TOLERANCE:
                self._board.note("mixed", (self._worker, "generate", first))
        self._board.note(f"answers/{self._worker}", len(completions))

    def _distance(self, version: int, ids: np.ndarray, completion: Completion) -> float:
        """Return the largest log-prob difference over the tokens that `version` sampled. Tokens after an update are
        left out, since they depend on a KV cache of two versions."""
        own = int((completion.policy_versions == version).sum())
        whole = np.concatenate([ids, completion.token_ids[:own]])
        return float(np.abs(logprobs_of(model_of(version), whole)[len(ids) - 1 :] - completion.logprobs[:own]).max())


def engine_process(board: Any, worker: str, incarnation: str, config: Config) -> None:
    """Run one worker until it is told to stop, or until the first error of its subscriber or engine."""
    torch.set_num_threads(1)
    trap = LoadTrap()
    broadcast_subscriber.post = protocol.post = trap.post  # `protocol.answer` posts the subscriber's answer
    vllm_settings.EXTENSION = f"{TrappedCalls.__module__}.{TrappedCalls.__qualname__}"
    engine: Any = make_engine(config)
    receiver: Any = Staging()
    if isinstance(engine, OwnProcesses):
        trap.around_load(engine)
        receiver = engine.receiver()

    def score(sequences: Any) -> list[np.ndarray]:
        trap.at("prove")
        return engine.score(sequences)  # pyright: ignore[reportAttributeAccessIssue]

    def load(version: int, tensors: Any) -> None:
        trap.at("before load")
        engine.load_weights(version, tensors)  # pyright: ignore[reportAttributeAccessIssue]
        trap.at("after load")

    board.join(worker, incarnation)
    subscriber = BroadcastSubscriber(
        WorkerRendezvous(board, worker), load, worker=worker, incarnation=incarnation,
        timeout_s=config.weights.timeout_s, receiver=TrappedReceiver(receiver, trap),
        proof=Proof(score=score, engine_dtype="float32", verify_every=1),
    )  # fmt: skip
    witness = Witness(board, worker, engine)
    orders = 0
    try:
        while not board.notes(f"stop/{worker}"):
            subscriber.check()
            if witness.error is not None:
                raise witness.error
            for injection, fired in board.notes(f"arm/{worker}/{incarnation}")[orders:]:
                orders += 1
                if injection.who == "core":
                    engine.call_workers("asyncrl_arm", injection.action, injection.phase, fired)  # pyright: ignore[reportAttributeAccessIssue]
                else:
                    trap.arm(injection.action, injection.phase, Path(fired).touch)
                board.note("armed", injection.name)
            time.sleep(0.05)
    except Exception as error:  # end of the process: the error is part of the report
        board.note("ended", (worker, incarnation, f"{type(error).__name__}: {error}"))
    finally:
        subscriber.close()
        asyncio.run(engine.close())  # pyright: ignore[reportAttributeAccessIssue]
        os._exit(0)  # the witness may wait for an engine that no longer answers


def learner_process(board: Any, first: int, timeout_s: float, injection: Injection | None, fired: str) -> None:
    torch.set_num_threads(1)
    trap = Trap()
    broadcast_publisher.post = trap.post
    broadcast_publisher.WeightGroup = trap.group()
    if injection is not None and injection.phase.split()[-1] in ("invite", "go"):
        trap.arm(injection.action, injection.phase, Path(fired).touch)
    sender = BroadcastSender(board, Link(host="127.0.0.1", timeout_s=timeout_s), poll_members_s=0.2)
    publisher = WeightPublisher(
        sender, wire_dtype=torch.float32, bucket_bytes=BUCKET, wait_s=60 * timeout_s, idle_s=0.005
    )
    version = first
    while True:
        canary = Canary(sequences=PROBES, logprobs=expected(version), learner_dtype="float32", wire_dtype="float32")
        publisher.publish(version, model_of(version).named_parameters(), canary)
        board.note("published", version)
        if injection is not None and version == first + 2:
            trap.arm(injection.action, injection.phase, Path(fired).touch)
        version += 1
        time.sleep(PAUSE_S)
