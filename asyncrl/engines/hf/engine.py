"""Continuous batching over a Hugging Face causal LM: one engine thread, asyncio callers, weights swapped in flight.

Each iteration of the thread, in this order: drop cancelled requests, swap in weights, prefill waiting requests (each
prompt once, whatever `n`), one decode step of all running sequences.

Updates keep the KV cache of running sequences, unless `weights.on_update=recompute`: a sequence that spans an update is
then sampled from old keys and new weights. The recorded log-prob of every token is still that of the distribution it
was sampled from.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.hf.batch import RunningBatch
from asyncrl.engines.hf.requests import (
    Inbox,
    Job,
    LoadJob,
    Pending,
    ScoreJob,
    chunks,
    hand_out,
)
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.engines.request_check import check_ids, check_request
from asyncrl.errors import GenerationError, RequestError, WeightsError
from asyncrl.pace import Pace
from asyncrl.spans import moment
from asyncrl.types import NO_VERSION, Completion

_POLL_S = 0.5
_COUNTERS = ("generated_tokens", "prefill_tokens", "requests", "loads", "cancelled", "load_s", "stall_s")


class TransformersEngine:
    """Implements `engines.base.Engine`.

    Args:
        runner: the model with its KV slots.
        threads: intra-op threads of the engine thread (CPU).
        load_timeout_s: longest that `load_weights` waits for the end of a decode step.
        recompute: whether an update recomputes the KV cache of running sequences.
    """

    def __init__(
        self, runner: ModelRunner, threads: int = 1, load_timeout_s: float = 600.0, *, recompute: bool = False
    ) -> None:
        self._runner = runner
        self._threads = threads
        self._load_timeout_s = load_timeout_s
        self._recompute = recompute
        self._batch = RunningBatch(runner.max_sequences)
        self._inbox = Inbox()
        self._admitted: list[Pending] = []
        """Requests taken from the inbox but not yet in the batch: without it a failing prefill would leave their
        callers waiting."""
        self._scoring: Job | None = None
        """Scoring job taken from the inbox, for the same reason."""
        self._policy_version = self._sampled_version = NO_VERSION
        """Versions of the served weights, and of the last sampled token."""
        self._stats: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        self._decoded, self._prefilled = Pace(), Pace()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()
        self._wait_ready()

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_length(self) -> int:
        return self._runner.max_length

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        most = self._runner.max_sequences
        check_request(request, self._runner.vocabulary, self.max_length)
        if request.n > most:
            raise RequestError(f"n={request.n} siblings never fit engine.max_sequences={most}. Raise it, or lower n.")
        loop = asyncio.get_running_loop()
        pending = Pending(request, loop, loop.create_future())
        self._inbox.put(self._inbox.waiting, pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._inbox.cancel(pending)
            raise

    def load_weights(self, policy_version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._runner.parameters.check(tensors)
        job = LoadJob(policy_version=policy_version, tensors=tensors)
        try:
            self._inbox.put(self._inbox.loads, job)
        except GenerationError as error:
            raise WeightsError(f"version {policy_version} cannot be loaded: {error}") from error
        deadline = time.monotonic() + self._load_timeout_s
        # Waits for the engine thread: the current decode step.
        while not job.done.wait(_POLL_S):
            if not self._thread.is_alive() and not job.done.is_set():
                raise WeightsError(f"version {policy_version} was not loaded: {self._inbox.failure!r}")
            if time.monotonic() > deadline and self._inbox.withdraw(job):
                raise WeightsError(
                    f"version {policy_version} was not loaded: no decode step ended within {self._load_timeout_s:g} s, "
                    "so the engine thread hangs"
                )
        if job.error is not None:
            raise WeightsError(f"version {policy_version} was not loaded: {job.error}") from job.error

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        for ids in sequences:
            check_ids(ids, self._runner.vocabulary)
            if not 2 <= len(ids) <= self._runner.max_length:
                raise GenerationError(
                    f"a sequence to score must have 2 to {self._runner.max_length} tokens; got {len(ids)}"
                )
        job = ScoreJob(sequences=sequences)
        self._inbox.put(self._inbox.scores, job)
        # Waits for the engine thread: the current decode step. If it dies, it answers every job.
        while not job.done.wait(_POLL_S):
            if not self._thread.is_alive() and not job.done.is_set():
                raise GenerationError(f"nothing was scored: {self._inbox.failure!r}")
        if job.error is not None:
            raise GenerationError(f"nothing was scored: {job.error}") from job.error
        return job.logprobs

    def stats(self) -> dict[str, float]:
        with self._inbox.condition:
            waiting = sum(pending.request.n for pending in self._inbox.waiting)
        paces = self._decoded.named("decode") | self._prefilled.named("prefill")
        return {**self._stats, **paces, "running": float(self._batch.rows), "waiting": float(waiting)}

    async def close(self) -> None:
        self._inbox.close()
        await asyncio.to_thread(self._thread.join, 60.0)

    def _wait_ready(self) -> None:
        # The model check runs on the engine thread: this waits for it, or for the thread's death.
        while not self._ready.wait(_POLL_S):
            if not self._thread.is_alive():
                break
        if self._inbox.failure is not None:
            raise self._inbox.failure

    # ---- the engine thread: consumes the inbox, waits for callers and loads, unblocked by the inbox's condition ----

    def _main(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                self._runner.check_model()
                self._ready.set()
                while self._wait_for_work():
                    self._turn()
        except Exception as error:  # thread boundary: any error must reach every caller, or they would wait for ever
            self._inbox.close(error)
        finally:
            self._fail_everyone()

    def _wait_for_work(self) -> bool:
        """Wait for work; false once the engine is closed."""
        inbox = self._inbox
        with inbox.condition:
            work = (inbox.waiting, inbox.loads, inbox.scores)
            while not (inbox.closed or any(work) or self._batch.rows or inbox.dirty):
                inbox.condition.wait(_POLL_S)
            return not inbox.closed

    def _turn(self) -> None:
        if self._inbox.dirty:
            self._forget_cancelled()
        if self._inbox.loads:
            self._load()
        while self._inbox.scores:
            self._score(self._inbox.scores.popleft())
        for chunk in self._admit():
            self._prefill(chunk)
        self._admitted = []
        if self._batch.rows:
            self._decode()

    def _forget_cancelled(self) -> None:
        inbox, batch = self._inbox, self._batch
        with inbox.condition:
            inbox.dirty = False
            kept = [pending for pending in inbox.waiting if not pending.cancelled]
            inbox.waiting.clear()
            inbox.waiting.extend(kept)
        rows = np.array([row for row, (pending, _) in enumerate(batch.owners) if pending.cancelled], np.int64)
        self._stats["cancelled"] += len(rows)
        self._drop_rows(rows)

    def _load(self) -> None:
        """Swap in all waiting weights; an older version that is overtaken counts as loaded too."""
        started = time.perf_counter()
        with self._inbox.condition:
            jobs = list(self._inbox.loads)
            self._inbox.loads.clear()
        for job in jobs:
            try:
                self._runner.load(job.tensors)
                if self._recompute and job is jobs[-1]:
                    self._recompute_keys()
                self._policy_version = job.policy_version
            except RuntimeError as error:
                # Checked before, so this is a device failure during the copy: the weights are mixed. Stop.
                job.error = error
                raise
            finally:
                job.done.set()
            self._stats["loads"] += 1
        seconds = time.perf_counter() - started
        self._stats["load_s"] += seconds
        self._stats["stall_s"] += seconds  # nothing is decoded meanwhile

    def _recompute_keys(self) -> None:
        """Recompute the KV cache of all running rows with the weights that have just been loaded."""
        first = 0
        for chunk in chunks([int(length) for length in self._batch.length[: self._batch.rows]]):
            cache, _ = self._runner.prefill([self._batch.held(first + row) for row in range(len(chunk))])
            self._runner.slots.fill(cache, torch.arange(len(chunk), device=self._runner.device), first)
            first += len(chunk)
            self._stats["prefill_tokens"] += sum(chunk)

    def _score(self, job: ScoreJob) -> None:
        self._scoring = job
        job.logprobs = self._runner.score(job.sequences)
        job.done.set()

    def _admit(self) -> list[list[Pending]]:
        """Take waiting requests that fit, in order of arrival, in chunks for one prefill each."""
        inbox = self._inbox
        if not inbox.waiting:
            return []
        with inbox.condition:
            free = self._runner.max_sequences - self._batch.rows
            admitted: list[Pending] = []
            while inbox.waiting:
                pending = inbox.waiting[0]
                if pending.request.n > free:
                    break
                free -= pending.request.n
                admitted.append(inbox.waiting.popleft())
            self._admitted = admitted
        sizes = chunks([len(pending.request.prompt_ids) for pending in admitted])
        rest = iter(admitted)
        return [list(itertools.islice(rest, len(chunk))) for chunk in sizes]

    def _prefill(self, chunk: list[Pending]) -> None:
        """Prefill each prompt once, copy its keys to all siblings, and sample their first tokens."""
        started = time.perf_counter()
        runner, batch, first = self._runner, self._batch, self._batch.rows
        wanted = any(pending.request.sampling.record_routing for pending in chunk)
        with runner.routing(wanted, len(chunk)) as routed:
            cache, logits = runner.prefill([pending.request.prompt_ids for pending in chunk])
        for pending in chunk:
            batch.add(pending)
        repeats = [pending.request.n for pending in chunk]
        source = torch.from_numpy(np.repeat(np.arange(len(chunk)), repeats)).to(runner.device)
        runner.slots.reserve(batch.rows, max(len(pending.request.prompt_ids) for pending in chunk) + 1)
        runner.slots.fill(cache, source, first)
        self._stats["requests"] += len(chunk)
        self._stats["prefill_tokens"] += sum(len(pending.request.prompt_ids) for pending in chunk)
        batch.route([each for each, n in zip(routed, repeats, strict=False) for _ in range(n)], first)
        self._sample(logits[source], first)
        self._prefilled.add(len(chunk), time.perf_counter() - started)

    def _decode(self) -> None:
        started, batch = time.perf_counter(), self._batch
        rows = batch.rows
        with self._runner.routing(batch.any_routed, rows) as routed:
            logits = self._runner.decode(batch.last_tokens(), batch.length[:rows])
        batch.route(routed)
        batch.length[:rows] += 1
        self._sample(logits, 0)
        self._decoded.add(rows, time.perf_counter() - started)

    def _sample(self, logits: torch.Tensor, start: int) -> None:
        """Sample the next token of rows `[start, rows)`, and return the completions that end with it to their
        callers."""
        batch = self._batch
        temperature = batch.temperature[start : batch.rows]
        drawn = self._runner.sample(
            logits, temperature, batch.uniforms(start), batch.any_greedy, batch.truncations(start), batch.topk
        )
        self._stats["generated_tokens"] += len(drawn.tokens)
        if self._sampled_version != self._policy_version:
            self._sampled_version = self._policy_version
            moment("first token", version=self._policy_version)
        finished = batch.record(drawn.tokens, drawn.logprobs, self._policy_version, start, drawn.recorded)
        if not len(finished):
            return
        owners = [batch.owners[row] for row in finished.tolist()]
        made = zip(owners, batch.completions(finished), strict=True)
        hand_out([pending for (pending, member), completion in made if pending.finish_member(member, completion)])
        self._drop_rows(finished)

    def _drop_rows(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        longest = int(self._batch.length[: self._batch.rows].max())
        source, target = self._batch.remove(rows)
        if len(source):
            device = self._runner.device
            self._runner.slots.move(torch.from_numpy(source).to(device), torch.from_numpy(target).to(device), longest)

    def _fail_everyone(self) -> None:
        """Fail all requests and jobs when the engine stops, so that no caller waits for ever."""
        self._inbox.close()
        self._ready.set()
        waiting, jobs = self._inbox.drain()
        reason = (
            f"the engine thread stopped: {self._inbox.failure!r}" if self._inbox.failure else "the engine was closed"
        )
        for pending in {
            id(p): p for p in [*waiting, *self._admitted, *(owner for owner, _ in self._batch.owners)]
        }.values():
            pending.fail(GenerationError(f"request {pending.request.request_id!r} was not finished: {reason}"))
        for job in [*jobs, *([self._scoring] if self._scoring is not None else [])]:
            if not job.done.is_set():
                job.error = WeightsError(reason)
                job.done.set()
