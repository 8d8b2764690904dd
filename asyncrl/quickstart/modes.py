"""The quickstart's task: the base model can solve it but mostly does not, and learns to.

In the warm-up text `abcde>` is answered in one of four ways: reversed (30 %), copied, sorted or rotated. The reward is
for the reversal, so RL selects one of the modes that the model already has, as it does in large models. A word is five
different letters out of ten. Measured: a model this small reverses such words reliably; with repeated letters or longer
words it does not, and RL levels off at 0.6. Held-out words are selected by a hash of the word.
"""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

REVERSE_SHARE = 0.3
WORD_LENGTH = 5
LETTERS = "abcdefghij"
HELD_OUT_OF_16 = 1
"""Number of sixteenths of all words that are only in the held-out set."""


def reverse(word: str) -> str:
    """The answer that is rewarded."""
    return word[::-1]


def is_held_out(word: str) -> bool:
    """Depends on the word (or question) only, so no list of them has to be shared to keep the sets disjoint."""
    return zlib.crc32(word.encode()) % 16 < HELD_OUT_OF_16


def sample_word(rng: random.Random, *, held_out: bool) -> str:
    while True:  # ends: one word in sixteen is held out, the others are not
        word = "".join(rng.sample(LETTERS, WORD_LENGTH))
        if is_held_out(word) == held_out:
            return word


def warmup_example(rng: random.Random) -> tuple[str, str]:
    """`(prompt, answer)` of the warm-up text, in a random mode. Never uses a held-out word."""
    word = sample_word(rng, held_out=False)
    if rng.random() < REVERSE_SHARE:
        return f"{word}>", reverse(word)
    return f"{word}>", rng.choice((word, "".join(sorted(word)), word[1:] + word[0]))


def write_modes(directory: str | Path, *, seed: int, train_rows: int = 8192, eval_rows: int = 256) -> tuple[Path, Path]:
    """Write `train.jsonl` and `heldout.jsonl` (columns `prompt`, `answer`; no word twice) and return their paths."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    train, heldout = target / "train.jsonl", target / "heldout.jsonl"
    _write_rows(train, random.Random(f"modes-train-{seed}"), train_rows, held_out=False)
    _write_rows(heldout, random.Random(f"modes-heldout-{seed}"), eval_rows, held_out=True)
    return train, heldout


def _write_rows(path: Path, rng: random.Random, count: int, *, held_out: bool) -> None:
    words: dict[str, None] = {}
    while len(words) < count:
        words[sample_word(rng, held_out=held_out)] = None
    rows = (json.dumps({"prompt": f"{word}>", "answer": reverse(word)}) + "\n" for word in words)
    path.write_text("".join(rows))
