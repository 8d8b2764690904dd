"""Supervised warm-up of the quickstart's agents: `python -m asyncrl.learner.warmup.agent FOLDER RECIPE-JSON`.

Like `base_model`, on the conversations of `asyncrl.data.quick_agents`; the tool's output is not trained on.
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
from asyncrl.data.quick_agents import AGENTS, CHAT_TEMPLATE, Agent, Part
from asyncrl.data.warmup_recipe import AgentRecipe
from asyncrl.learner.warmup.base_model import IGNORED, PROBES, build_model, padded, train


class Conversations:
    """Implements `base_model.WarmupTask`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._tokenizer = byte_tokenizer(agent.phrases)
        rng = random.Random("warm-up probes")
        probes = [agent.right_conversation(agent.sample(rng, held_out=False)) for _ in range(PROBES)]
        self._probes = padded(*self._tokens(probes))

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, rounded up to a multiple of 8."""
        return -(-(VOCAB_SIZE + len(self._agent.phrases)) // 8) * 8

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


def main(folder: str, recipe_json: str) -> None:
    recipe = AgentRecipe(**json.loads(recipe_json))
    agent = AGENTS[recipe.agent]
    task = Conversations(agent)
    torch.manual_seed(recipe.seed)
    model = build_model(recipe, task.vocabulary)
    steps, sampled, greedy = train(model, recipe, random.Random(f"agent-warm-up-{recipe.seed}"), task)
    target = Path(folder)
    model.save_pretrained(target)
    save_byte_tokenizer(target, agent.phrases, CHAT_TEMPLATE)
    print(f"base model: {sampled:.1%} of samples right, {greedy:.1%} greedy, after {steps} steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
