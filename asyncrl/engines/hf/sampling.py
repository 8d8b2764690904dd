"""Samples tokens from logits, with the log-probs of the distribution that they were sampled from."""

from __future__ import annotations

import torch


def at_temperature(logits: torch.Tensor, temperature: torch.Tensor, any_greedy: bool) -> torch.Tensor:
    """[R, V] float32 logits, divided by the temperature."""
    scale = torch.where(temperature > 0, temperature, 1.0) if any_greedy else temperature
    return logits.float() / scale.unsqueeze(1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    any_greedy: bool,
    support: torch.Tensor | None = None,
    topk: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Inverse-CDF sampling: one uniform per row, so a row's draw does not depend on its batch-mates.

    Args:
        logits: [R, V] any float dtype.
        temperature: [R] float32; 0 is greedy, with log-probs at temperature 1.
        uniform: [R] float64 in [0, 1).
        any_greedy: whether any temperature is 0 (known on the host; saves a device synchronisation).
        support: [R, V] bool, the tokens that each row may sample; None is the whole vocabulary.
        topk: number of most likely tokens to return too; 0 returns none.

    Returns:
        [R] int64 token ids; their [R] float32 log-probs, `log_softmax(logits / temperature)` over the support; and the
        [R, k] log-probs and ids of the k most likely tokens, at most the whole vocabulary.
    """
    scaled = at_temperature(logits, temperature, any_greedy)
    if support is not None:
        scaled = scaled.masked_fill(~support, -torch.inf)
    logprobs = torch.log_softmax(scaled, dim=-1)
    # float64: with a float32 sum the rare tail of a large vocabulary would be sampled in lumps of 1e-7. The
    # probabilities are computed from the recorded log-probs, so that the two agree.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    threshold = (uniform * cumulative[:, -1]).unsqueeze(1)
    # `right=True` and the clamp: a token of probability 0 is never sampled, even at uniform 0 or by rounding up.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    tokens = torch.minimum(torch.searchsorted(cumulative, threshold, right=True), last)
    if any_greedy:
        tokens = torch.where((temperature > 0).unsqueeze(1), tokens, logits.argmax(dim=-1, keepdim=True))
    likeliest = logprobs.topk(min(topk, logprobs.shape[1]), dim=-1) if topk else None
    chosen = logprobs.gather(1, tokens).squeeze(1)
    return tokens.squeeze(1), chosen, None if likeliest is None else (likeliest.values, likeliest.indices)
