"""Supervised warm-up of the quickstart's base models: `python -m asyncrl.quickstart.base_model FOLDER RECIPE-JSON`.

A plain loop over text: next-token cross entropy on what the model is to write, one process, CPU.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch.nn import functional
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.quickstart import agents
from asyncrl.quickstart.agents import AGENTS, Agent, Part
from asyncrl.quickstart.byte_tokenizer import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    byte_tokenizer,
    save_byte_tokenizer,
)
from asyncrl.quickstart.modes import reverse, sample_word, warmup_example
from asyncrl.quickstart.recipes import AgentRecipe, WarmupRecipe

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
    """Words, with one of several kinds of answers (`asyncrl.quickstart.modes`)."""

    seed = "warm-up"
    template = CHAT_TEMPLATE
    phrases = ()
    vocabulary = VOCAB_SIZE

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


class Conversations:
    """Conversations with a tool (`asyncrl.quickstart.agents`), whose output is not trained on."""

    seed = "agent-warm-up"
    template = agents.CHAT_TEMPLATE

    def __init__(self, agent: Agent) -> None:
        self._agent, self.phrases = agent, agent.phrases
        self._tokenizer = byte_tokenizer(agent.phrases)
        rng = random.Random("warm-up probes")
        probes = [agent.right_conversation(agent.sample(rng, held_out=False)) for _ in range(PROBES)]
        self._probes = padded(*self._tokens(probes))

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, rounded up to a multiple of 8."""
        return -(-(VOCAB_SIZE + len(self.phrases)) // 8) * 8

    def batch(self, rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return padded(*self._tokens([self._agent.warmup_conversation(rng) for _ in range(size)]))

    @torch.no_grad()
    def accuracy(self, model: Qwen2ForCausalLM, *, greedy: bool) -> float:
        """Mean probability of the right conversation; if `greedy`, how often all of its tokens are the most likely."""
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
    given = json.loads(recipe_json)
    recipe = AgentRecipe(**given) if "agent" in given else WarmupRecipe(**given)
    task = Conversations(AGENTS[recipe.agent]) if isinstance(recipe, AgentRecipe) else Modes()
    torch.manual_seed(recipe.seed)
    model = build_model(recipe, task.vocabulary)
    steps, sampled, greedy = train(model, recipe, random.Random(f"{task.seed}-{recipe.seed}"), task)
    target = Path(folder)
    model.save_pretrained(target)
    save_byte_tokenizer(target, task.phrases, task.template)
    print(f"base model: {sampled:.1%} of samples right, {greedy:.1%} greedy, after {steps} steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
