"""A base model of 3 M parameters for four tasks of reasoning-gym, and their rows, from which RL starts in the table.

    python -m benchmarks.parts.gym_base FOLDER RECIPE-JSON       makes the model (`paths` calls it)

The warm-up teaches the model to answer, mostly in a wrong way: every letter and digit is the successor of the right
one. RL has to select the right way, in four tasks at once. The questions are reasoning-gym's; each of their fixed
phrases is one token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.environments.reasoning.environment import COLUMN
from asyncrl.quickstart.prepare import cache_root, make, scratch_beside
from asyncrl.quickstart.recipes import WarmupRecipe

TASKS: dict[str, dict[str, int]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "count_bits": {"min_n": 1, "max_n": 1023},
    "letter_counting": {"min_words": 1, "max_words": 1},
}
"""Task -> its settings, of a difficulty that such a model can learn."""
PHRASES = (
    "Spell this word backward (example: sun -> nus): ",
    "State the final answer to the following arithmetic problem: ",
    "How many 1 bits are there in the binary representation of the number ",
    'How many times does the letter "',
    '" appear in the text: "',
)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}>{% endfor %}"
SIZE = 4096
"""Questions of each task, from which the rows and the warm-up are taken."""
HELD_OUT = 64
"""Held-out questions of each task. None of them is used for training or for the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymRecipe(WarmupRecipe):
    hidden_size: int = 192
    layers: int = 5
    heads: int = 6
    intermediate_size: int = 768
    check_every: int = 50
    right_share: float = 0.15
    """Share of right answers in the warm-up. The others are those of `beside`."""
    min_sampled_accuracy: float = 0.1


SETTINGS = (
    "environment=reasoning_gym",
    "environment.args.tagged=false",
    "environment.args.system=''",
    "environment.args.processes=1",
    "reward.function=''",
    "reward.metric=reward",
    "model.renderer=default",
    "data.max_prompt_tokens=32",
)
"""Settings of a run, in addition to those of the quickstart."""
MEASURED = "eval/heldout/reward"
"""Metric of an evaluation: the mean reward, since tasks of reasoning-gym give partial rewards too."""


def questions() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows to train and the rows held out, with tasks in turn. No question is in both."""
    from asyncrl.environments.reasoning.tasks import entry_of

    trained, held = [], []
    for task, settings in TASKS.items():
        seen: dict[str, dict[str, Any]] = {}
        for index in range(SIZE):
            entry = entry_of(task, 0, SIZE, index, json.dumps(settings))
            origin = {"task": task, "seed": 0, "size": SIZE, "index": index, "config": settings}
            row = {"prompt": [{"role": "user", "content": entry["question"]}], "answer": str(entry["answer"])}
            seen.setdefault(entry["question"], {**row, COLUMN: origin})
        rows = list(seen.values())
        random.Random(task).shuffle(rows)
        held.append(rows[:HELD_OUT] if len(rows) > 2 * HELD_OUT else rows[: len(rows) // 4])
        trained.append(rows[len(held[-1]) :])
    return _in_turn(trained, max(map(len, trained))), _in_turn(held, HELD_OUT)


def beside(answer: str) -> str:
    """Return the wrong answer: each letter and digit replaced by its successor."""
    return "".join(chr(ord(sign) + 1) if sign.isalnum() else sign for sign in answer)


def _in_turn(tasks: Sequence[Sequence[dict[str, Any]]], most: int) -> list[dict[str, Any]]:
    """Return `most` rows of each task, in turn. The rows of small tasks are repeated."""
    return [rows[place % len(rows)] for place in range(most) for rows in tasks]


def paths(recipe: GymRecipe = GymRecipe()) -> list[str]:
    """Return settings that name the base model and its rows, which are made once and kept. Raises AsyncRLError."""
    text = json.dumps([dataclasses.asdict(recipe), TASKS, PHRASES, TEMPLATE, SIZE, HELD_OUT], sort_keys=True)
    folder = cache_root() / f"gym-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        with scratch_beside(folder) as made:
            make("benchmarks.parts.gym_base", str(made), json.dumps(dataclasses.asdict(recipe)))
    files = {"model.path": "model", "data.path": "train.jsonl", "eval.path": "heldout.jsonl"}
    return [f"{key}={folder / name}" for key, name in files.items()]


def main(folder: str, recipe_json: str) -> None:
    import torch

    from asyncrl.quickstart.base_model import IGNORED, PROBES, build_model, padded, train
    from asyncrl.quickstart.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer, save_byte_tokenizer

    recipe = GymRecipe(**json.loads(recipe_json))
    trained, held = questions()
    tokenizer = byte_tokenizer(PHRASES)
    by_task = [[row for row in trained if row[COLUMN]["task"] == task] for task in TASKS]

    def tokens(row: dict[str, Any], answer: str) -> tuple[list[int], list[int]]:
        head = tokenizer.encode(f"{row['prompt'][0]['content']}>").ids
        tail = [*tokenizer.encode(answer).ids, EOS_ID]
        return head + tail, [IGNORED] * len(head) + tail

    class Mixture:
        """Implements `warmup.WarmupTask`."""

        def batch(self, rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            made = []
            for _ in range(size):
                row = rng.choice(rng.choice(by_task))
                right = rng.random() < recipe.right_share
                made.append(tokens(row, row["answer"] if right else beside(row["answer"])))
            return padded([ids for ids, _ in made], [labels for _, labels in made])

        @torch.no_grad()
        def accuracy(self, model: Any, *, greedy: bool) -> float:
            """Return the mean probability of the right answers to held-out questions; if `greedy`, the share of them
            that greedy decoding gives."""
            ids, labels = padded(*zip(*[tokens(row, row["answer"]) for row in held[:PROBES]], strict=True))
            logprobs, wanted = model(input_ids=ids[:, :-1]).logits.log_softmax(-1), labels[:, 1:]
            counts = wanted != IGNORED
            if greedy:
                return ((logprobs.argmax(-1) == wanted) | ~counts).all(-1).float().mean().item()
            return (logprobs.gather(-1, wanted.clamp(min=0)[..., None])[..., 0] * counts).sum(-1).exp().mean().item()

    torch.manual_seed(recipe.seed)
    model = build_model(recipe, -(-(VOCAB_SIZE + len(PHRASES)) // 8) * 8)
    steps, sampled, greedy = train(model, recipe, random.Random(f"gym-{recipe.seed}"), Mixture())
    target = Path(folder)
    model.save_pretrained(target / "model")
    save_byte_tokenizer(target / "model", PHRASES, TEMPLATE)
    for name, rows in (("train", trained), ("heldout", held)):
        (target / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"base model: {sampled:.1%} of samples right, {greedy:.1%} greedy, after {steps} steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
