"""The models of `experiment=smoke/NAME`: `python -m asyncrl.quickstart.smoke_models FOLDER`, one process, CPU.

model/        answers every prompt with one of a few numbers, in every form that the recipes' rewards read
caller/       the same, but first writes a program and a query, one number each
teacher/      like model/, with only the first of the numbers
classifier/   one output over the model's body, with a random head: usable as a reward model
"""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, Qwen2ForCausalLM

from asyncrl.quickstart.base_model import IGNORED, build_model, fit, next_token_loss
from asyncrl.quickstart.byte_tokenizer import EOS_ID, PAD_ID, save_byte_tokenizer
from asyncrl.quickstart.recipes import WarmupRecipe
from asyncrl.quickstart.smoke_rows import ANSWERS

STEPS, CALLER_STEPS, TEACHER_STEPS, BATCH, LR = 150, 200, 20, 8, 3e-3
LONGEST_PROMPT = 200
PROBES = 32
MIN_READABLE = 0.5
TURN = "\nassistant: "
"""What comes before an answer in the byte tokenizer's chat template."""


FORMS = ("#### {}\n", "Answer: {}\n", "<answer>{}</answer>")
"""The forms of GSM8K, of DAPO-Math, and of tasks that ask for tags; a completion contains one after the other."""


Ways = tuple[tuple[str, tuple[str, ...]], ...]
"""(what comes before a completion, its forms); each is equally frequent."""
ANSWERING: Ways = ((TURN, FORMS),)
CALLING: Ways = (
    (TURN, ("<code>{}</code>", "<search>{}</search>")),  # the one that the environment supports ends the reply
    ("</information>\n", FORMS),
    ("</interpreter>\n", FORMS),
)


def completion(rng: random.Random, answers: Sequence[int], forms: Sequence[str]) -> str:
    """A completion with independent numbers: repeating one is more than so small a model learns in seconds."""
    return "".join(form.format(rng.choice(answers)) for form in forms)


def make_batch(rng: random.Random, answers: Sequence[int], ways: Ways) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, both [BATCH, T]: prompts of random bytes, all of the same length, so that nothing is padded."""
    length = rng.randrange(1, LONGEST_PROMPT)
    before, forms = rng.choice(ways)
    prompts = [[*rng.choices(range(32, 127), k=length), *before.encode()] for _ in range(BATCH)]
    texts = [[*completion(rng, answers, forms).encode(), EOS_ID] for _ in range(BATCH)]
    ids = torch.tensor([prompt + text for prompt, text in zip(prompts, texts, strict=True)])
    labels = ids.clone()
    labels[:, : len(prompts[0])] = IGNORED
    return ids, labels


def train(model: Qwen2ForCausalLM, answers: Sequence[int], steps: int, ways: Ways = ANSWERING) -> None:
    """Train `model` in place.

    Raises:
        SystemExit: less than MIN_READABLE of its samples are one of the completions.
    """
    rng = random.Random(f"smoke-{steps}")
    fit(model, steps, LR, lambda: next_token_loss(model, *make_batch(rng, answers, ways)))
    readable = min(share_readable(model, answers, *way) for way in ways)
    print(f"{readable:.0%} of the samples are answers")
    if readable < MIN_READABLE:
        raise SystemExit(f"after {steps} steps too few of the smoke model's samples are answers. Train it for longer")


@torch.no_grad()
def share_readable(model: Qwen2ForCausalLM, answers: Sequence[int], before: str, forms: Sequence[str]) -> float:
    """Fraction of the samples to one prompt ending in `before` that are exactly one of the completions."""
    prompt = [*b"user: how many?", *before.encode()]
    length = len(completion(random.Random(0), answers, forms))
    ids = torch.tensor([prompt] * PROBES)
    for _ in range(length + 1):
        ids = torch.cat([ids, torch.multinomial(model(input_ids=ids).logits[:, -1].softmax(-1), 1)], dim=1)
    said = re.compile("".join(form.format(f"[{''.join(map(str, answers))}]") for form in forms).encode())
    rows = [row[len(prompt) :] for row in ids.tolist()]
    whole = [row[-1] == EOS_ID and said.fullmatch(bytes(min(token, 255) for token in row[:-1])) for row in rows]
    return sum(map(bool, whole)) / PROBES


def main(folder: str) -> None:
    target = Path(folder)
    torch.manual_seed(0)
    model = build_model(WarmupRecipe())
    train(model, ANSWERS, STEPS)
    caller = copy.deepcopy(model)
    train(caller, ANSWERS, CALLER_STEPS, CALLING)
    model.save_pretrained(target / "model")
    caller.save_pretrained(target / "caller")
    train(model, ANSWERS[:1], TEACHER_STEPS)
    model.save_pretrained(target / "teacher")
    AutoModelForSequenceClassification.from_pretrained(
        target / "model", num_labels=1, pad_token_id=PAD_ID, trust_remote_code=False
    ).save_pretrained(target / "classifier")
    for name in ("model", "caller", "teacher", "classifier"):
        save_byte_tokenizer(target / name)
    print("made the smoke models: base, tool calls, teacher, classifier")


if __name__ == "__main__":
    main(sys.argv[1])
