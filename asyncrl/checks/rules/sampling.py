"""Rules for truncated sampling: top-p, top-k and min-p, in training and in evaluations."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.checks.problem import Problems
from asyncrl.schema import Config, EvalConfig, RolloutConfig

NO_MASKS = {
    "vllm": "vLLM 0.32 returns what a token was drawn from only by its second model runner (a GPU, with Triton), which "
    "has not been tried here",
    "server": "a vLLM server does not say what a token was drawn from",
    "sglang": "its log-probs are those before anything was left out",
    "fake": "it draws from no distribution",
}
"""Why an engine cannot report the support from which it sampled."""


def truncation(room: str, settings: RolloutConfig | EvalConfig) -> str:
    """Return those of top-p, top-k and min-p that exclude tokens, as they are typed; empty if none does."""
    values = (("top_p", settings.top_p, 1.0), ("top_k", settings.top_k, 0), ("min_p", settings.min_p, 0.0))
    return " ".join(f"{room}.{name}={value:g}" for name, value, nothing in values if value != nothing)


def group_has_different_members(config: Config) -> Problems:
    if config.rollout.top_k == 1:
        yield (
            "rollout.top_k=1 always gives the likeliest token, so the samples of a group are all the same. Set 2 or "
            "more, or 0 (off)"
        )


def truncation_needs_samples(config: Config) -> Problems:
    if (said := truncation("eval", config.eval)) and config.eval.temperature == 0:
        yield (
            f"{said} does nothing at eval.temperature=0, which decodes greedily. Set eval.temperature=1, or leave it "
            "out"
        )


def engine_says_what_it_drew_from(config: Config) -> Problems:
    reason = NO_MASKS.get(config.engine.name)
    if reason and (said := truncation("rollout", config.rollout)):
        yield (
            f"{said} with engine={config.engine.name}: {reason}. Without that, every importance ratio is biased, "
            "because the learner's log-probs are over the whole vocabulary. Use engine=transformers, which records "
            "it, or leave it out and sample from the whole distribution (rollout.temperature stays exact). "
            "Evaluations take eval.top_p, eval.top_k and eval.min_p with any engine"
        )


def reference_is_renormalised_too(config: Config) -> Problems:
    if config.reference.from_rollout and (said := truncation("rollout", config.rollout)):
        yield (
            f"{said} with reference.path=rollout: the environment's log-probs are over the whole vocabulary, and the "
            "learner's over the tokens that were left to draw from, so their difference is not a KL. Set "
            "reference.path=MODEL, which the learner renormalises in the same way, or leave it out"
        )


RULES: tuple[Callable[[Config], Problems], ...] = (
    group_has_different_members,
    truncation_needs_samples,
    engine_says_what_it_drew_from,
    reference_is_renormalised_too,
)
