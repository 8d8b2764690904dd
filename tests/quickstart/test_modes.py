from __future__ import annotations

import json
import random
import subprocess
import sys

from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from asyncrl.quickstart import byte_tokenizer as bt
from asyncrl.quickstart.modes import is_held_out, reverse, sample_word, warmup_example, write_modes


def test_the_files_have_the_asked_rows_no_word_twice_and_no_word_in_both(tmp_path):
    paths = write_modes(tmp_path, seed=1, train_rows=500, eval_rows=64)
    train, heldout = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
    assert (len(train), len(heldout)) == (500, 64)
    words = [row["prompt"] for row in train + heldout]
    assert len(set(words)) == 564
    assert all(row["answer"] == row["prompt"].rstrip(">")[::-1] for row in train + heldout)


def test_the_same_seed_writes_the_same_files(tmp_path):
    first = [path.read_bytes() for path in write_modes(tmp_path / "a", seed=3, train_rows=50, eval_rows=8)]
    again = [path.read_bytes() for path in write_modes(tmp_path / "b", seed=3, train_rows=50, eval_rows=8)]
    other = [path.read_bytes() for path in write_modes(tmp_path / "c", seed=4, train_rows=50, eval_rows=8)]
    assert first == again != other


def test_the_warm_up_answers_in_four_ways_and_shows_no_held_out_word():
    rng = random.Random(0)
    examples = [warmup_example(rng) for _ in range(4000)]
    assert not any(is_held_out(prompt.rstrip(">")) for prompt, _ in examples)
    long = [(prompt[:-1], answer) for prompt, answer in examples]
    kinds = {
        "reverse": sum(answer == reverse(word) for word, answer in long),
        "copy": sum(answer == word for word, answer in long),
        "sort": sum(answer == "".join(sorted(word)) for word, answer in long),
        "rotate": sum(answer == word[1:] + word[0] for word, answer in long),
    }
    assert 0.25 < kinds["reverse"] / len(long) < 0.36
    assert all(0.18 < kinds[kind] / len(long) < 0.29 for kind in ("copy", "sort", "rotate"))


def test_words_of_the_wanted_set_are_sampled():
    rng = random.Random(0)
    assert all(is_held_out(sample_word(rng, held_out=True)) for _ in range(50))


@given(st.text())
def test_the_byte_tokenizer_round_trips_any_text(text):
    tokenizer = bt.byte_tokenizer()
    assume("<|" not in text)  # the special tokens are read as themselves
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_byte_tokenizer_loads_through_auto_tokenizer(tmp_path):
    bt.save_byte_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    assert len(tokenizer) == bt.VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer.decode([*b"a . b ,", 258, 263], skip_special_tokens=True) == "a . b ,"
    tokenizer.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=False)
    assert again.encode("é>") == [195, 169, 62]


def test_data_and_rewards_load_no_torch():
    code = (
        "import sys, asyncrl.quickstart.prepare, asyncrl.quickstart.byte_tokenizer;"
        "import asyncrl.data.prompts, asyncrl.rewards.pool;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=150).returncode == 0
