"""Tokenizers that add a space before a text: none is added behind other tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from asyncrl.chat.base import Message
from asyncrl.chat.names import DEFAULT
from asyncrl.chat.renderer import RendererChat
from asyncrl.chat.seam import Seam
from asyncrl.quickstart.byte_tokenizer import EOS_ID
from asyncrl.rollout.worker.tokenizer import make_decode, make_encode
from tests.chat import markers, spaced

TEXTS = ("ab", " ab", "4", "    return 4", "hello ab")
TALK: list[Message] = [
    {"role": "user", "content": "ab?"},
    {"role": "assistant", "content": "hello ab"},
    {"role": "user", "content": "4?"},
    {"role": "assistant", "content": "4"},
]


def tokens(of: Any, ids: Any) -> list[str]:
    return of.convert_ids_to_tokens(list(map(int, ids)))


@pytest.mark.parametrize("text", [*TEXTS, "\nab", "\n\nab", "", "é", "  "])
@pytest.mark.parametrize("kind", ["legacy", "today"])
def test_a_text_behind_others_is_its_own_and_no_space_more_or_less(kind: str, text: str) -> None:
    of = spaced.tokenizer(kind)
    ids = make_encode(of)(text)
    assert make_decode(of)([ids], special=True) == [text]
    before = of.encode("f:", add_special_tokens=False)
    assert of.decode([*before, *ids.tolist()]) == f"f:{text}"


@pytest.mark.parametrize("text", ["ab", " ab", "hello ab", " 4"])
def test_a_tokenizer_of_unigrams_too_which_writes_all_white_space_as_one_space(text: str) -> None:
    of = spaced.tokenizer("unigram")
    ids = make_encode(of)(text)
    before = of.encode("f:", add_special_tokens=False)
    assert make_decode(of)([ids]) == [text] and of.decode([*before, *ids]) == f"f:{text}"


def test_a_letter_that_is_half_there_and_an_end_that_was_sampled_are_told_as_before() -> None:
    of = spaced.tokenizer("legacy")
    half, end = of.convert_tokens_to_ids("<0xC3>"), of.eos_token_id
    assert make_decode(of)([np.array([half]), np.array([end]), np.array([], np.int32)]) == ["�", "", ""]
    assert make_decode(of)([np.array([end])], special=True) == ["</s>"]


def test_of_a_tokenizer_that_adds_no_space_nothing_changes() -> None:
    of = markers.tokenizer()
    seam = Seam(of)
    assert not seam._spaced
    for text in (*TEXTS, "\n", "é"):
        assert seam.encode(text) == of.encode(text, add_special_tokens=False) and seam.decode(seam.encode(text)) == text
    assert (seam.decode([EOS_ID]), seam.decode([EOS_ID], special=True)) == ("", "<|eos|>")


@pytest.mark.parametrize("words", [{"apple": 1, "pear": 2}, {"a": 1, "apple": 2, "pear": 3}])
def test_of_a_tokenizer_of_words_nothing_changes_and_no_letter_is_lost(words: dict[str, int]) -> None:
    of = spaced.tokenizer_of_words({"<unk>": 0, **words})
    assert make_decode(of)([np.array([words["apple"], words["pear"]])]) == ["apple pear"]
    assert make_encode(of)("pear apple").tolist() == [words["pear"], words["apple"]]


def test_the_white_space_that_an_end_takes_with_it_is_not_added_behind_it() -> None:
    of = spaced.tokenizer_of_bytes(AddedToken("<|end|>", special=True, normalized=False, rstrip=True))
    chat = RendererChat(of, DEFAULT, {}, chosen=True)
    prompt, turn = chat.render(TALK[:1]), chat.seam.encode("hello ab<|end|>")
    follows = chat.extend(prompt, turn, TALK[2:3])
    whole = of.apply_chat_template(TALK[:3], tokenize=True, return_dict=False, add_generation_prompt=True)
    assert [*prompt, *turn, *follows] == whole


def test_a_long_conversation_takes_about_as_long_per_token_as_a_short_one() -> None:
    of, lengths = spaced.tokenizer("legacy"), list[int]()
    seam = Seam(of)
    seam._ids = lambda text: (lengths.append(len(text)), of.encode(text, add_special_tokens=False))[1]  # pyright: ignore
    assert "".join(tokens(of, seam.encode(" ab", behind="hello f:" * 1000))) == f"{spaced.MARK}ab"
    assert max(lengths) < 100


@pytest.mark.parametrize("kind", spaced.KINDS)
def test_what_is_learned_of_a_chat_is_written_as_the_template_writes_the_whole_of_it(kind: str) -> None:
    of = spaced.tokenizer(kind)
    chat = RendererChat(of, DEFAULT, {}, chosen=True)
    found = chat.supervise(TALK, learned=(False, True, False, True))
    whole = of.apply_chat_template(TALK, tokenize=True, return_dict=False)
    assert tokens(of, found.token_ids) == tokens(of, whole)
    learned = [token for token, is_in in zip(found.token_ids, found.loss_mask, strict=True) if is_in]
    assert chat.seam.decode(learned, special=True) == " hello ab </s> 4 </s>"


@pytest.mark.parametrize("kind", spaced.KINDS)
@pytest.mark.parametrize("ended", [True, False])
def test_what_follows_a_sampled_turn_is_what_the_template_writes_there(kind: str, ended: bool) -> None:
    of = spaced.tokenizer(kind)
    chat = RendererChat(of, DEFAULT, {}, chosen=True)
    turn = chat.seam.encode(" hello ab" + "</s>" * ended)
    follows = chat.extend(chat.render(TALK[:1]), turn, TALK[2:3])
    whole = of.apply_chat_template(TALK[:3], tokenize=True, return_dict=False)
    after = tokens(of, whole)[tokens(of, whole).index("</s>") + 1 :]
    assert tokens(of, follows) == (after if ended else [spaced.MARK, "</s>", *after])
