"""Sums up vLLM's own metrics as they arrive, for the worker's report and the admission window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from asyncrl.pace import Pace


class EngineMeter:
    """Totals since the start. Written on the engine's loop, read from any thread."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self.generated_tokens = 0
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.decoded, self.prefilled = Pace(), Pace()
        self.stood_still = False
        """Whether the engine was paused for an update since the last step: the next one seems to take that much
        longer."""
        self.preemptions = 0
        self.running = 0
        self.usage = 0.0
        self._on_step = on_step

    def record(self, scheduler: Any, iteration: Any) -> None:
        """`SchedulerStats` and `IterationStats` of one step; either may be missing."""
        if iteration is not None:
            self.generated_tokens += iteration.num_generation_tokens
            self.prefill_tokens += iteration.prompt_token_stats.computed
            self.cached_tokens += iteration.prompt_token_stats.cached_tokens
            self.preemptions += iteration.num_preempted_reqs
            self._time(iteration.inter_token_latencies_iter, len(iteration.time_to_first_tokens_iter))
        if scheduler is not None:
            self.running, self.usage = scheduler.num_running_reqs, scheduler.kv_cache_usage
            self._on_step()

    def _time(self, since: Sequence[float], prompts: int) -> None:
        """Time one step. `since`: seconds since the previous token, of each sequence beyond its first token; the
        shortest is the step's, since others may have been preempted. The extra time of a step with prompts is their
        prefill."""
        if not since:
            return
        stood_still, self.stood_still = self.stood_still, False
        if stood_still:
            return
        seconds = min(since)
        if not prompts:
            self.decoded.add(len(since), seconds)
        elif self.decoded.steps:
            fixed, each = self.decoded.line()
            self.prefilled.add(prompts, seconds - fixed - each * len(since))


class MeterLogger(StatLoggerBase):
    """Called by vLLM after every step; `stat_loggers` takes a factory, `functools.partial` of this with the meter."""

    def __init__(self, meter: EngineMeter, vllm_config: Any, engine_index: int = 0) -> None:
        self._meter = meter

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._meter.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Nothing to log."""
