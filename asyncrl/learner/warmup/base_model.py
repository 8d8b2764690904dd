"""Supervised warm-up of the quickstart's base model: `python -m asyncrl.learner.warmup.base_model FOLDER RECIPE-JSON`.

A plain loop over the text of `asyncrl.data.modes`: next-token cross entropy on the answer, one process, CPU.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch.nn import functional
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.data.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, save_byte_tokenizer
from asyncrl.data.modes import reverse, sample_word, warmup_example
from asyncrl.data.warmup_recipe import WarmupRecipe

IGNORED = -100
PROBES = 256
"""Words on which the sampled accuracy is measured: a standard error of 2 points around 10 %."""
ANSWER_TOKENS = 10


class WarmupTask(Protocol):
    def batch(self, rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels, both [size, longest]; labels are IGNORED on all that the model does not generate."""
        ...

    def accuracy(self, model: Qwen2ForCausalLM, *, greedy: bool) -> float:
        """Fraction of right answers."""
        ...


def build_model(recipe: WarmupRecipe, vocab_size: int = VOCAB_SIZE) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=recipe.initializer_range,
            pad_token_id=PAD_ID,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
        )
    )


def fit(model: PreTrainedModel, steps: int, lr: float, loss: Callable[[], torch.Tensor]) -> None:
    """AdamW steps down `loss`, with a learning rate that falls to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps)
    for _ in range(steps):
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def next_token_loss(model: Qwen2ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the labels that are not IGNORED."""
    logits = model(input_ids=ids[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def padded(rows: list[list[int]], labels: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad both to [rows, longest]."""
    longest = max(map(len, rows))
    # Padding on the right: attention is causal, so the padding changes nothing before it and needs no mask.
    ids = torch.tensor([row + [PAD_ID] * (longest - len(row)) for row in rows])
    targets = torch.tensor([row + [IGNORED] * (longest - len(row)) for row in labels])
    return ids, targets


class Modes:
    """Words, with one of several kinds of answers."""

    def batch(self, rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, labels = [], []
        for _ in range(size):
            prompt, answer = warmup_example(rng)
            head, tail = list(prompt.encode()), [*answer.encode(), EOS_ID]
            rows.append(head + tail)
            labels.append([IGNORED] * len(head) + tail)
        return padded(rows, labels)

    @torch.no_grad()
    def accuracy(self, model: Qwen2ForCausalLM, *, greedy: bool) -> float:
        """Fraction of PROBES training words whose reversal is the answer; those of one length are decoded together."""
        generator = torch.Generator().manual_seed(0)
        rng = random.Random("warm-up probes")
        by_length: dict[int, list[str]] = {}
        for _ in range(PROBES):
            word = sample_word(rng, held_out=False)
            by_length.setdefault(len(word), []).append(word)
        right = 0
        for words in by_length.values():
            ids = torch.tensor([list(f"{word}>".encode()) for word in words])
            start = ids.shape[1]
            for _ in range(ANSWER_TOKENS):
                logits = model(input_ids=ids).logits[:, -1]
                chosen = (
                    logits.argmax(-1, keepdim=True)
                    if greedy
                    else torch.multinomial(logits.softmax(-1), 1, generator=generator)
                )
                ids = torch.cat([ids, chosen], dim=1)
            for word, row in zip(words, ids[:, start:].tolist(), strict=True):
                right += row[: len(word) + 1] == [*reverse(word).encode(), EOS_ID]
        return right / PROBES


def train(
    model: Qwen2ForCausalLM, recipe: WarmupRecipe, rng: random.Random, task: WarmupTask
) -> tuple[int, float, float]:
    """Train until samples are right often enough. Returns the steps taken, and sampled and greedy accuracy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, recipe.max_steps + 1):
        next_token_loss(model, *task.batch(rng, recipe.batch_size)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % recipe.check_every == 0:
            sampled = task.accuracy(model, greedy=False)
            if sampled >= recipe.min_sampled_accuracy:
                return step, sampled, task.accuracy(model, greedy=True)
    raise SystemExit(
        f"after {recipe.max_steps} steps fewer than {recipe.min_sampled_accuracy:.0%} of the samples are right: too "
        "few for reinforcement learning to start from. Raise max_steps"
    )


def main(folder: str, recipe_json: str) -> None:
    recipe = WarmupRecipe(**json.loads(recipe_json))
    torch.manual_seed(recipe.seed)
    model = build_model(recipe)
    steps, sampled, greedy = train(model, recipe, random.Random(f"warm-up-{recipe.seed}"), Modes())
    target = Path(folder)
    model.save_pretrained(target)
    save_byte_tokenizer(target)
    print(f"base model: {sampled:.1%} of samples right, {greedy:.1%} greedy, after {steps} steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
