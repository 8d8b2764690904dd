"""Supervised warm-up of the calculator's agent: `python -m asyncrl.learner.tools_warmup FOLDER RECIPE-JSON`.

As `asyncrl.learner.warmup`, on the conversations of `asyncrl.data.calculator`: what the tool says is not learned.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from asyncrl.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer, save_byte_tokenizer
from asyncrl.data.calculator import (
    CHAT_TEMPLATE,
    PHRASES,
    Part,
    right_conversation,
    sample_expression,
    warmup_conversation,
)
from asyncrl.data.warmup_recipe import CalculatorRecipe
from asyncrl.learner.warmup import IGNORED, PROBES, build_model, padded, train

VOCABULARY = -(-(VOCAB_SIZE + len(PHRASES)) // 8) * 8


class Conversations:
    """Implements `warmup.WarmupTask`."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer(PHRASES)
        rng = random.Random("warm-up probes")
        probes = [right_conversation(sample_expression(rng, held_out=False)) for _ in range(PROBES)]
        self._probes = padded(*self._tokens(probes))

    def batch(self, rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return padded(*self._tokens([warmup_conversation(rng) for _ in range(size)]))

    @torch.no_grad()
    def accuracy(self, model: Qwen2ForCausalLM, *, greedy: bool) -> float:
        """Of the one way that is right: its probability, or whether each of its tokens is the likeliest."""
        ids, labels = self._probes
        logprobs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
        wanted = labels[:, 1:]
        counts = wanted != IGNORED
        index = wanted.clamp(min=0)[..., None]
        if greedy:
            return ((logprobs.argmax(-1) == wanted) | ~counts).all(-1).float().mean().item()
        return (logprobs.gather(-1, index)[..., 0] * counts).sum(-1).exp().mean().item()

    def _tokens(self, conversations: Sequence[Sequence[Part]]) -> tuple[list[list[int]], list[list[int]]]:
        rows: list[list[int]] = []
        labels: list[list[int]] = []
        for conversation in conversations:
            parts = [(self._tokenizer.encode(text).ids, learned) for text, learned in conversation]
            rows.append([token for ids, _ in parts for token in ids])
            labels.append([token if learned else IGNORED for ids, learned in parts for token in ids])
        return rows, labels


def main(folder: str, recipe_json: str) -> None:
    recipe = CalculatorRecipe(**json.loads(recipe_json))
    torch.manual_seed(recipe.seed)
    model = build_model(recipe, VOCABULARY)
    steps, sampled, greedy = train(model, recipe, random.Random(f"tools-warm-up-{recipe.seed}"), Conversations())
    target = Path(folder)
    model.save_pretrained(target)
    save_byte_tokenizer(target, PHRASES, CHAT_TEMPLATE)
    print(f"base model: {sampled:.1%} of samples right, {greedy:.1%} greedy, after {steps} steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
