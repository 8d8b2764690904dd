"""Makes the quickstart's reward model: `python -m asyncrl.quickstart.reward_model BASE-FOLDER FOLDER RECIPE-JSON`.

A sequence classifier on the warmed-up base model, trained on right and wrong answers: one process, CPU, seconds.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from asyncrl.quickstart.base_model import fit
from asyncrl.quickstart.byte_tokenizer import PAD_ID, save_byte_tokenizer
from asyncrl.quickstart.recipes import RewardRecipe
from asyncrl.quickstart.reward_examples import judged_example
from asyncrl.rewards.reward_model import pad_rows

PROBES = 512
"""Answers on which the accuracy is measured: a standard error of one point around 95 %."""


def make_batch(rng: random.Random, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and attention mask, both [size, longest], and labels [size], 1 for a right answer."""
    examples = [judged_example(rng) for _ in range(size)]
    rows = [list(f"{prompt}{answer}".encode()) for prompt, answer, _ in examples]
    return *pad_rows(rows, PAD_ID), torch.tensor([float(right) for _, _, right in examples])


def train(model: PreTrainedModel, recipe: RewardRecipe, rng: random.Random) -> float:
    """Logistic regression on the model's single output, with a learning rate that falls to 0. Returns the accuracy on
    new answers.

    Raises:
        SystemExit: the accuracy is below `min_accuracy`.
    """

    def loss() -> Tensor:
        ids, attention, labels = make_batch(rng, recipe.batch_size)
        logits = model(input_ids=ids, attention_mask=attention).logits[:, 0]
        return functional.binary_cross_entropy_with_logits(logits, labels)

    fit(model, recipe.steps, recipe.lr, loss)
    with torch.no_grad():
        ids, attention, labels = make_batch(rng, PROBES)
        logits = model(input_ids=ids, attention_mask=attention).logits[:, 0]
    accuracy = ((logits > 0) == (labels > 0.5)).float().mean().item()
    if accuracy < recipe.min_accuracy:
        raise SystemExit(
            f"after {recipe.steps} steps the reward model judges only {accuracy:.1%} of the answers correctly, fewer "
            f"than {recipe.min_accuracy:.0%}. Raise steps"
        )
    return accuracy


def main(base: str, folder: str, recipe_json: str) -> None:
    recipe = RewardRecipe(**json.loads(recipe_json))
    torch.manual_seed(recipe.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, pad_token_id=PAD_ID, trust_remote_code=False
    )
    accuracy = train(model, recipe, random.Random(f"reward-{recipe.seed}"))
    target = Path(folder)
    model.save_pretrained(target)
    save_byte_tokenizer(target)
    print(f"reward model: {accuracy:.1%} of new answers judged correctly, after {recipe.steps} steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
