"""How much is made at once. Each of these numbers has one owner, and what follows from them is worked out here alone.

    rollout.max_in_flight   groups of the whole run. Owner: the replay server, which admits no more
                            (`replay/core/admission.py`), however many workers ask
    slots_per_worker        groups that one worker holds, or members of groups (`replay.admission=sample`). Derived: its
                            share of them, and no more than keep its engine full; more would only wait, and age
    engine.max_sequences    sequences that one engine decodes together. Owner: the engine, for its memory (vLLM's
                            `max_num_seqs`, the rows of the built-in engine's cache). More wait in it, oldest first
    vLLM's AdmissionWindow  how many of those vLLM is given just now: from its KV cache, never above the setting

So `rollout.max_in_flight` is what to raise while engines are not full, `engine.max_sequences` what to lower where one
runs out of memory; nothing else bounds them but the staleness gate (`replay.pipeline_depth`).
"""

from __future__ import annotations

from asyncrl.schema import Config


def slots_per_worker(config: Config) -> int:
    """Orders that one worker works on at once: its share of `rollout.max_in_flight`, and no more than keep its engine
    full."""
    size = config.rollout.group_size
    members = 1 if config.replay.admission == "sample" else size
    sequences = config.engine.max_sequences * max(1, len(config.engine.urls))
    share = -(-config.rollout.max_in_flight * (size // members) // config.rollout.workers)
    return max(1, min(share, prompts_that_fill(sequences, members)))


def prompts_that_fill(sequences: int, completions: int) -> int:
    """How many prompts, of so many completions each, keep an engine of so many sequences full: a quarter more than it
    decodes together, so that the place of a finished one is taken without a round trip."""
    together = max(1, sequences // completions)
    return together + -(-together // 4)


def sequences_per_engine(config: Config) -> int:
    """Sequences that one engine decodes together when its worker has work for every slot."""
    members = 1 if config.replay.admission == "sample" else config.rollout.group_size
    return min(config.engine.max_sequences, slots_per_worker(config) * members)
