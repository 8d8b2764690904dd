"""A base model of 3 M parameters for four tasks of reasoning-gym, and their rows: what RL starts from in the table.

    python -m benchmarks.parts.gym_base FOLDER RECIPE-JSON       makes the model (`paths` calls it)

The warm-up teaches it to answer, mostly in a wrong way: every letter and digit is the one behind the right one. RL has
to select the other way, in four tasks at once. Questions are reasoning-gym's; their standing words are one token each.
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

from asyncrl.cli.quickstart import cache_root, make, scratch_beside
from asyncrl.data.warmup_recipe import WarmupRecipe
from asyncrl.environments.reasoning.environment import COLUMN

TASKS: dict[str, dict[str, int]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "count_bits": {"min_n": 1, "max_n": 1023},
    "letter_counting": {"min_words": 1, "max_words": 1},
}
"""Name -> settings: of a size that such a model learns."""
PHRASES = (
    "Spell this word backward (example: sun -> nus): ",
    "State the final answer to the following arithmetic problem: ",
    "How many 1 bits are there in the binary representation of the number ",
    'How many times does the letter "',
    '" appear in the text: "',
)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}>{% endfor %}"
SIZE = 4096
"""Questions of each task, over which the rows and the warm-up are spread."""
HELD_OUT = 64
"""Of each task, and none of them is trained or warmed up on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymRecipe(WarmupRecipe):
    hidden_size: int = 192
    layers: int = 5
    heads: int = 6
    intermediate_size: int = 768
    check_every: int = 50
    right_share: float = 0.15
    """Of the answers; the others are beside the right ones."""
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
"""Of a run, beside those of the quickstart."""
MEASURED = "eval/heldout/reward"
"""Tasks of reasoning-gym give parts of a reward, too."""


def questions() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train and rows held out, tasks in turn, no question twice and none in both."""
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
    """Each letter and digit is the next one."""
    return "".join(chr(ord(sign) + 1) if sign.isalnum() else sign for sign in answer)


def _in_turn(tasks: Sequence[Sequence[dict[str, Any]]], most: int) -> list[dict[str, Any]]:
    """As many of each, the rows of small tasks again and again."""
    return [rows[place % len(rows)] for place in range(most) for rows in tasks]


def paths(recipe: GymRecipe = GymRecipe()) -> list[str]:
    """Settings that name the base model and its rows, which are made once and kept. Raises AsyncRLError."""
    text = json.dumps([dataclasses.asdict(recipe), TASKS, PHRASES, TEMPLATE, SIZE, HELD_OUT], sort_keys=True)
    folder = cache_root() / f"gym-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        with scratch_beside(folder) as made:
            make("benchmarks.parts.gym_base", str(made), json.dumps(dataclasses.asdict(recipe)))
    files = {"model.path": "model", "data.path": "train.jsonl", "eval.path": "heldout.jsonl"}
    return [f"{key}={folder / name}" for key, name in files.items()]


def main(folder: str, recipe_json: str) -> None:
    import torch

    from asyncrl.data.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer, save_byte_tokenizer
    from asyncrl.learner.warmup.base_model import IGNORED, PROBES, build_model, padded, train

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
            """Probability of the right answers to what is held out, or the share that is likeliest token by token."""
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
