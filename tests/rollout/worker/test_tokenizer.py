"""A tokenizer and a model in one folder that do not belong together are refused at start, by name."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

from asyncrl.config import load_config
from asyncrl.data import local_tokenizer
from asyncrl.data.local_tokenizer import tokenizer_digest
from asyncrl.errors import ConfigError
from asyncrl.quickstart.byte_tokenizer import CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, save_byte_tokenizer
from asyncrl.rollout.worker import wiring
from asyncrl.rollout.worker.tokenizer import check_vocabulary, load_tokenizer, make_encode, stop_token_ids
from asyncrl.rollout.worker.watchdog import EndWatch


def folder(path, vocabulary: int) -> str:
    Qwen2Config(vocab_size=vocabulary).save_pretrained(path)
    save_byte_tokenizer(path)
    return str(path)


@pytest.mark.parametrize("vocabulary", [VOCAB_SIZE, EOS_ID + 1, 10 * VOCAB_SIZE])
def test_a_model_with_room_for_all_tokens_is_fine(tmp_path, vocabulary):
    assert check_vocabulary(folder(tmp_path, vocabulary), load_tokenizer(str(tmp_path))) == vocabulary


def test_an_observation_is_encoded_as_it_stands_with_the_special_tokens_that_are_written_out(tmp_path):
    save_byte_tokenizer(tmp_path)
    ids = make_encode(load_tokenizer(str(tmp_path)))(" no!<|eos|>")
    assert ids.tolist() == [*b" no!", EOS_ID] and ids.dtype == np.int32


def test_it_is_said_where_transformers_gives_other_tokens_than_the_file_does(tmp_path, caplog):
    """Of Qwen2 it takes no other tokenizer than Qwen2's, and splits and normalises texts as that does."""
    load_tokenizer(folder(tmp_path, VOCAB_SIZE))
    assert not caplog.records
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "if": 1, "return": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    load_tokenizer(str(tmp_path))
    assert "transformers loads its tokenizer as a Qwen2Tokenizer" in caplog.text


def test_a_worker_reads_the_file_of_its_tokenizer_once_beside_transformers(tmp_path, monkeypatch):
    """Of Qwen3 each time takes half a second."""
    path, read = folder(tmp_path, VOCAB_SIZE), []
    of_the_learner = tokenizer_digest(path)

    class Counted:
        @staticmethod
        def from_file(file: str) -> Tokenizer:
            read.append(file)
            return Tokenizer.from_file(file)

    monkeypatch.setattr(local_tokenizer, "Tokenizer", Counted)

    class Enough(Exception):
        pass

    def copies(_: object, __: object, digest: str) -> None:
        read.append(digest)
        raise Enough

    async def closed() -> None:
        return

    monkeypatch.setattr(wiring, "SameCopies", copies)
    monkeypatch.setattr(wiring, "RolloutClient", lambda *_, **__: SimpleNamespace(rendezvous=dict, close=closed))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "r.py").write_text("def f(completion, row): return 1.0")
    own = [f"data.path={tmp_path}/rows.jsonl", f"reward.function={tmp_path}/r.py:f"]
    config = load_config([f"model.path={path}", *own, "engine=fake"])
    with pytest.raises(Enough):
        asyncio.run(wiring.run_worker(config, "w", "d", EndWatch()))
    assert read == [f"{path}/tokenizer.json", of_the_learner]


def test_a_completion_ends_where_generation_config_says_so_else_where_config_does(tmp_path, caplog):
    path = folder(tmp_path, VOCAB_SIZE)
    config = tmp_path / "config.json"
    tokenizer = load_tokenizer(path)
    assert stop_token_ids(path, tokenizer) == (EOS_ID,)
    for eos, ends in ((7, [7]), ([7, 8], [7, 8])):
        for given in ({"eos_token_id": eos}, {"eos_token_id": None, "text_config": {"eos_token_id": eos}}):
            config.write_text(json.dumps(given))
            assert stop_token_ids(path, tokenizer) == (*ends, EOS_ID)
    GenerationConfig(temperature=0.5, do_sample=True).save_pretrained(tmp_path)
    assert stop_token_ids(path, tokenizer) == (7, 8, EOS_ID)
    GenerationConfig(eos_token_id=9).save_pretrained(tmp_path)
    assert stop_token_ids(path, tokenizer) == (9, EOS_ID)
    assert not caplog.records


def test_environments_know_the_ends_of_a_turn_that_rollouts_stop_at(tmp_path):
    """They ask whether the policy's turn is open, and may write into one that is."""
    path = folder(tmp_path, VOCAB_SIZE)
    GenerationConfig(eos_token_id=9).save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "r.py").write_text("def f(completion, row): return 1.0")
    own = [f"data.path={tmp_path}/rows.jsonl", f"reward.function={tmp_path}/r.py:f"]
    texts = wiring.load_texts(load_config([f"model.path={path}", *own, "engine=fake"]))
    assert texts.sampling.stop_token_ids == texts.chat.stop_token_ids == (9, EOS_ID)
    save_byte_tokenizer(tmp_path, template=CHAT_TEMPLATE.replace("\n{% endfor", "<|reserved_260|>\n{% endfor"))
    texts = wiring.load_texts(load_config([f"model.path={path}", *own, "engine=fake"]))
    assert texts.sampling.stop_token_ids == texts.chat.stop_token_ids == (9, EOS_ID, 260), "the template's own end"
    save_byte_tokenizer(tmp_path, template=CHAT_TEMPLATE.replace("\n{% endfor", "[/]\n{% endfor"))
    texts = wiring.load_texts(load_config([f"model.path={path}", *own, "engine=fake"]))
    assert texts.sampling.stop_token_ids == (9, EOS_ID) and texts.sampling.stop == texts.chat.stop_texts == ("[/]",)


def test_it_is_said_where_no_token_ends_a_completion(tmp_path, caplog):
    path = folder(tmp_path, VOCAB_SIZE)
    tokenizer = load_tokenizer(path)
    tokenizer.eos_token = None
    assert stop_token_ids(path, tokenizer, (5,)) == (5,) and not caplog.records
    assert stop_token_ids(path, tokenizer) == ()
    assert "no token ends a completion" in caplog.text and "Give the tokenizer an eos_token" in caplog.text


@pytest.mark.parametrize(("vocabulary", "id_"), [(200, EOS_ID), (EOS_ID, EOS_ID)])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_with_both_numbers(tmp_path, vocabulary, id_):
    said = rf"tokenizer uses token ids up to {id_}, but its model's vocab_size is {vocabulary}\. .* different models"
    with pytest.raises(ConfigError, match=said):
        check_vocabulary(folder(tmp_path, vocabulary), load_tokenizer(str(tmp_path)))


def test_a_model_without_a_config_is_refused(tmp_path):
    save_byte_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="has no config that transformers can read"):
        check_vocabulary(str(tmp_path), load_tokenizer(str(tmp_path)))
