"""Continuous batching over a Hugging Face causal LM: one engine thread, asyncio callers, weights swapped in flight.

Each turn of the thread, in this order: forget cancelled requests, swap in weights if nothing forbids it, prefill
waiting requests (each prompt once, whatever `n`), one decode step of everything that runs.

Updates keep the KV of running sequences: a sequence that spans an update was sampled from old keys and new weights,
and the recorded log-prob of every token is that of the distribution it was drawn from all the same.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping

import numpy as np
import torch

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.batch import RunningBatch
from asyncrl.engines.requests import Inbox, LoadJob, Pending
from asyncrl.engines.runner import ModelRunner
from asyncrl.errors import GenerationError, WeightsError
from asyncrl.types import NO_VERSION, Completion

_PREFILL_PROMPTS = 32
_PREFILL_TOKENS = 16384
_POLL_S = 0.5
_COUNTERS: tuple[str, ...] = (
    "generated_tokens", "prefill_tokens", "prefill_rows", "decode_steps", "decode_rows", "requests", "loads",
    "cancelled", "busy_s", "load_s",
)  # fmt: skip


class TransformersEngine:
    """Implements `engines.base.Engine`.

    Args:
        runner: the model with its slots.
        threads: intra-op threads of the engine thread (CPU).
        load_timeout_s: longest `load_weights` waits for pinned requests to finish.
    """

    def __init__(self, runner: ModelRunner, threads: int = 1, load_timeout_s: float = 600.0) -> None:
        self._runner = runner
        self._threads = threads
        self._load_timeout_s = load_timeout_s
        self._batch = RunningBatch(runner.max_sequences)
        self._inbox = Inbox()
        self._admitted: list[Pending] = []
        """Out of the inbox, not yet in the batch: without it a failing prefill would leave its callers waiting."""
        self._policy_version = NO_VERSION
        self._stats: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()
        self._wait_ready()

    @property
    def policy_version(self) -> int:
        return self._policy_version

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self._check_request(request)
        loop = asyncio.get_running_loop()
        pending = Pending(request, loop, loop.create_future())
        self._inbox.put(pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._inbox.cancel(pending)
            raise

    def load_weights(self, policy_version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._runner.parameters.check(tensors)
        job = LoadJob(policy_version, tensors)
        try:
            self._inbox.put_load(job)
        except GenerationError as error:
            raise WeightsError(f"version {policy_version} cannot be loaded: {error}") from error
        deadline = time.monotonic() + self._load_timeout_s
        # Waits for the engine thread: the current decode step, and any pinned request that runs.
        while not job.done.wait(_POLL_S):
            if not self._thread.is_alive() and not job.done.is_set():
                raise WeightsError(f"version {policy_version} was not loaded: {self._inbox.failure!r}")
            if time.monotonic() > deadline and self._inbox.withdraw(job):
                pinned = sorted({p.request.request_id for p, _ in self._batch.owners if p.request.pinned})
                raise WeightsError(
                    f"version {policy_version} was not loaded: waited {self._load_timeout_s:.0f} s for pinned requests "
                    f"{pinned[:3]}. Make evaluation chunks smaller."
                )
        if job.error is not None:
            raise WeightsError(f"version {policy_version} was not loaded: {job.error}") from job.error

    def stats(self) -> dict[str, float]:
        with self._inbox.condition:
            waiting = sum(pending.request.n for pending in self._inbox.waiting)
        return {**self._stats, "running": float(self._batch.rows), "waiting": float(waiting)}

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

    def _check_request(self, request: GenerateRequest) -> None:
        ids, vocabulary = request.prompt_ids, self._runner.vocabulary
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
            raise GenerationError(
                f"prompt token ids must be in [0, {vocabulary}), the model's vocabulary; got {ids.max()}"
            )
        longest, n = len(request.prompt_ids) + request.sampling.max_new_tokens, request.n
        limit, rows = self._runner.max_length, self._runner.max_sequences
        if len(request.prompt_ids) == 0 or n < 1 or request.sampling.max_new_tokens < 1:
            raise GenerationError(f"request {request.request_id!r} needs a prompt, n >= 1 and max_new_tokens >= 1")
        if request.sampling.temperature < 0:
            raise GenerationError(f"temperature must be >= 0 (0 is greedy), got {request.sampling.temperature}")
        if longest > limit:
            raise GenerationError(
                f"prompt and max_new_tokens together are {longest} tokens, the model holds {limit}. Shorten either."
            )
        if n > rows:
            raise GenerationError(f"n={n} siblings never fit engine.max_sequences={rows}. Raise it, or lower n.")

    # ---- the engine thread: consumes the inbox, waits for callers and loads, unblocked by the inbox's condition ----

    def _main(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                self._runner.check_model()
                self._ready.set()
                while self._wait_for_work():
                    started = time.perf_counter()
                    self._turn()
                    self._stats["busy_s"] += time.perf_counter() - started
        except Exception as error:  # thread boundary: whatever it was must reach every caller instead of a hang
            self._inbox.close(error)
        finally:
            self._fail_everyone()

    def _wait_for_work(self) -> bool:
        """False once the engine is closed."""
        inbox = self._inbox
        with inbox.condition:
            while not (inbox.closed or inbox.waiting or inbox.loads or self._batch.rows or inbox.dirty):
                inbox.condition.wait(_POLL_S)
            return not inbox.closed

    def _turn(self) -> None:
        if self._inbox.dirty:
            self._forget_cancelled()
        if self._inbox.loads:
            self._load()
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
        """Swap in the newest waiting weights, unless a pinned request runs; an overtaken older version is done too."""
        if any(pending.request.pinned for pending, _ in self._batch.owners):
            return
        started = time.perf_counter()
        with self._inbox.condition:
            jobs = list(self._inbox.loads)
            self._inbox.loads.clear()
        for job in jobs:
            try:
                self._runner.parameters.load(job.tensors)
                self._policy_version = job.policy_version
            except RuntimeError as error:
                # Checked before, so this is a device failure in mid-copy: the weights are of no version. Stop.
                job.error = error
                raise
            finally:
                job.done.set()
            self._stats["loads"] += 1
        self._stats["load_s"] += time.perf_counter() - started

    def _admit(self) -> list[list[Pending]]:
        """Waiting requests that fit, in order of arrival, in chunks for one prefill each.

        While a load waits for pinned requests, no new pinned one starts: otherwise they could hold it up for ever.
        """
        inbox = self._inbox
        if not inbox.waiting:
            return []
        with inbox.condition:
            free = self._runner.max_sequences - self._batch.rows
            admitted: list[Pending] = []
            held: list[Pending] = []
            while inbox.waiting:
                pending = inbox.waiting[0]
                if pending.request.pinned and inbox.loads:
                    held.append(inbox.waiting.popleft())
                    continue
                if pending.request.n > free:
                    break
                free -= pending.request.n
                admitted.append(inbox.waiting.popleft())
            inbox.waiting.extendleft(reversed(held))
            self._admitted = admitted
        return _chunks(admitted)

    def _prefill(self, chunk: list[Pending]) -> None:
        """Prefill each prompt once, give its keys to all siblings, and sample their first tokens."""
        runner, batch, first = self._runner, self._batch, self._batch.rows
        cache, logits = runner.prefill([pending.request.prompt_ids for pending in chunk])
        for pending in chunk:
            batch.add(pending)
        repeats = [pending.request.n for pending in chunk]
        source = torch.from_numpy(np.repeat(np.arange(len(chunk)), repeats)).to(runner.device)
        runner.slots.reserve(batch.rows, max(len(pending.request.prompt_ids) for pending in chunk) + 1)
        runner.slots.fill(cache, source, first)
        self._stats["requests"] += len(chunk)
        self._stats["prefill_rows"] += len(chunk)
        self._stats["prefill_tokens"] += sum(len(pending.request.prompt_ids) for pending in chunk)
        self._sample(logits[source], first)

    def _decode(self) -> None:
        batch = self._batch
        rows = batch.rows
        logits = self._runner.decode(batch.last_tokens(), batch.length[:rows])
        batch.length[:rows] += 1
        self._stats["decode_steps"] += 1
        self._stats["decode_rows"] += rows
        self._sample(logits, 0)

    def _sample(self, logits: torch.Tensor, start: int) -> None:
        """Draw the next token of rows `[start, rows)`, and hand out the completions that end with it."""
        batch = self._batch
        temperature = batch.temperature[start : batch.rows]
        tokens, logprobs = self._runner.sample(logits, temperature, batch.uniforms(start), batch.any_greedy)
        self._stats["generated_tokens"] += len(tokens)
        finished = batch.record(tokens, logprobs, self._policy_version, start)
        for row in finished.tolist():
            pending, member = batch.owners[row]
            pending.finish_member(member, batch.completion(row))
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
        """The engine is going down: nobody may be left waiting."""
        self._inbox.close()
        self._ready.set()
        waiting, loads = self._inbox.drain()
        reason = (
            f"the engine thread stopped: {self._inbox.failure!r}" if self._inbox.failure else "the engine was closed"
        )
        for pending in {
            id(p): p for p in [*waiting, *self._admitted, *(owner for owner, _ in self._batch.owners)]
        }.values():
            pending.fail(GenerationError(f"request {pending.request.request_id!r} was not finished: {reason}"))
        for job in loads:
            job.error = WeightsError(reason)
            job.done.set()


def _chunks(admitted: list[Pending]) -> list[list[Pending]]:
    """Split by prompt count and padded tokens, so that a prefill's activations stay bounded."""
    chunks: list[list[Pending]] = []
    longest = 0
    for pending in admitted:
        longest = max(longest, len(pending.request.prompt_ids))
        full = chunks and (len(chunks[-1]) >= _PREFILL_PROMPTS or longest * (len(chunks[-1]) + 1) > _PREFILL_TOKENS)
        if not chunks or full:
            chunks.append([])
            longest = len(pending.request.prompt_ids)
        chunks[-1].append(pending)
    return chunks
