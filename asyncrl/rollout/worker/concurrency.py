"""Concurrency limits. Each number has one owner, and the derived ones are computed only here.

    rollout.max_in_flight   groups of the whole run. Owner: the replay server, which admits no more
                            (`replay/core/admission.py`), for any number of workers
    slots_per_worker        groups that one worker holds, or members of groups (`replay.admission=sample`). Derived: its
                            share of them, limited to what keeps its engine full; more would only wait and get stale
    engine.max_sequences    sequences that one engine decodes together. Owner: the engine, for its memory (vLLM's
                            `max_num_seqs`, the rows of the built-in engine's cache). More wait in it, oldest first
    vLLM's AdmissionWindow  how many of those vLLM is given at the moment: from its KV cache, never above the setting

So raise `rollout.max_in_flight` while engines are not full, and lower `engine.max_sequences` if one runs out of memory.
Nothing else limits them but the staleness gate (`replay.pipeline_depth`).
"""

from __future__ import annotations

from asyncrl.schema import Config


def slots_per_worker(config: Config) -> int:
    """Assignments that one worker works on at once: its share of `rollout.max_in_flight`, at most a full engine."""
    size = config.rollout.group_size
    members = 1 if config.replay.admission == "sample" else size
    sequences = config.engine.max_sequences * max(1, len(config.engine.urls))
    share = -(-config.rollout.max_in_flight * (size // members) // config.rollout.workers)
    return max(1, min(share, prompts_that_fill(sequences, members)))


def prompts_that_fill(sequences: int, completions: int) -> int:
    """Number of prompts, with this many completions each, that keep an engine of this many sequences full: a quarter
    more than it decodes together, so that a finished one is replaced without a round trip."""
    together = max(1, sequences // completions)
    return together + -(-together // 4)


def sequences_per_engine(config: Config) -> int:
    """Sequences that one engine decodes together when all slots of its worker are in use."""
    members = 1 if config.replay.admission == "sample" else config.rollout.group_size
    return min(config.engine.max_sequences, slots_per_worker(config) * members)
