"""Rows as tokens: which of them carry loss, and what happens to rows that are too long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.chat.names import DEFAULT
from asyncrl.chat.renderer import RendererChat
from asyncrl.errors import DataError, OverlongError
from asyncrl.quickstart.byte_tokenizer import EOS_ID, save_byte_tokenizer
from asyncrl.sft.examples import Encoder, Examples, open_encoder
from asyncrl.sft.rows import Conversation, Texts
from asyncrl.sft.settings import SftDataConfig
from tests.chat import markers, spaced
from tests.sft.given import rows_of, settings

TALK = Conversation(
    messages=({"role": "user", "content": "q"}, {"role": "assistant", "content": "abc"}), learned=(False, True)
)


def encoder(folder: Path, *overrides: str) -> Encoder:
    return open_encoder(settings(folder, *overrides))


def test_of_two_texts_the_second_is_learned_and_its_end(tmp_path: Path) -> None:
    found = encoder(tmp_path).example(Texts(prompt="ab>", completion="cd"), "row")
    assert found.token_ids.tolist() == [*b"ab>cd", EOS_ID]
    assert found.loss_mask.tolist() == [False] * 3 + [True] * 3 and found.loss_tokens == 3


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("kind", spaced.KINDS)
def test_a_completion_has_the_spaces_that_are_written_and_no_end_stands_before_it(kind: str, ends: bool) -> None:
    """Of tokenizers that begin each text they are given with a space, or write the end behind it."""
    tokenizer = spaced.tokenizer(kind, ends)
    of = Encoder(tokenizer, RendererChat(tokenizer, DEFAULT, {}, chosen=True), SftDataConfig(), 1000)
    for completion, token in ((" 4", "▁4"), ("4", "4")):
        found = of.example(Texts(prompt="ab>", completion=completion), "row")
        tokens = tokenizer.convert_ids_to_tokens(found.token_ids.tolist())
        assert tokens[0] == "<s>" and tokens[-3:] == [">", token, "</s>"] and len(set(tokens)) == len(tokens)
        assert of.decode(found.token_ids[found.loss_mask].tolist(), begins=False) == f"{completion}</s>"


def test_a_conversation_goes_through_the_chat_template(tmp_path: Path) -> None:
    of = encoder(tmp_path)
    found = of.example(TALK, "row")
    assert of.decode(found.token_ids.tolist()) == "user: q\nassistant: abc<|eos|>"
    assert of.decode(found.token_ids[found.loss_mask].tolist()) == "abc<|eos|>"


def test_a_row_that_is_too_long_follows_the_rule(tmp_path: Path) -> None:
    long = Texts(prompt="p" * 6, completion="c" * 6)
    with pytest.raises(OverlongError, match=r"row 7: the row has 13 tokens, data\.max_tokens allows 10"):
        encoder(tmp_path, "data.max_tokens=10").example(long, "row 7")
    with pytest.raises(DataError, match=r"Raise data\.max_tokens"):
        encoder(tmp_path, "data.max_tokens=10", "data.overlong=error").example(long, "row 7")
    long = Texts(prompt="123456", completion="c" * 6)
    for side, kept in (("left", b"456"), ("right", b"123")):
        found = encoder(tmp_path, "data.max_tokens=10", f"data.overlong=truncate_{side}").example(long, "row 7")
        assert found.token_ids.tolist() == [*kept, *b"cccccc", EOS_ID] and found.loss_tokens == 7
        assert found.rendered == 13
        with pytest.raises(OverlongError, match="cuts the user's text alone, which is too little"):
            encoder(tmp_path, "data.max_tokens=7", f"data.overlong=truncate_{side}").example(long, "row 7")


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_cuts_the_user_s_text_of_a_conversation_and_nothing_else(tmp_path: Path, side: str) -> None:
    long = Conversation(
        messages=(
            {"role": "system", "content": "SYSTEM"},
            {"role": "user", "content": "0123456789" * 4},
            {"role": "assistant", "content": "abc"},
        ),
        learned=(False, False, True),
    )
    of = encoder(tmp_path, "data.max_tokens=41", f"data.overlong=truncate_{side}")
    found = of.example(long, "row")
    left = {"left": "6789", "right": "0123"}[side]
    assert of.decode(found.token_ids.tolist()) == f"system: SYSTEM\nuser: {left}\nassistant: abc<|eos|>"
    assert len(found.token_ids) == 41 and found.rendered == 77
    with pytest.raises(OverlongError, match="cuts the user's text alone"):
        encoder(tmp_path, "data.max_tokens=37", f"data.overlong=truncate_{side}").example(long, "row")


def test_a_template_that_the_tokenizer_lacks_is_told_with_the_row(tmp_path: Path) -> None:
    given = settings(tmp_path)
    save_byte_tokenizer(tmp_path / "model", template="")
    with pytest.raises(DataError, match=r"rows\.jsonl:4: .*no chat template"):
        open_encoder(given).example(TALK, "rows.jsonl:4")


def test_a_token_that_was_added_to_the_tokenizer_alone_is_told_with_the_row(tmp_path: Path) -> None:
    given = settings(tmp_path)
    save_byte_tokenizer(tmp_path / "model", phrases=["<call>"])
    with pytest.raises(DataError, match=r"row 3: .*token id 264, but the model has 264"):
        open_encoder(given).example(Texts(prompt="q", completion="<call>"), "row 3")


def test_a_row_is_rendered_once_as_far_as_there_is_room(tmp_path: Path) -> None:
    given = settings(tmp_path)
    rows, of = rows_of(given), open_encoder(given)
    kept = Examples([rows], of, kept_tokens=8)
    assert kept.example(0, 0) is kept.example(0, 0)
    late = kept.example(0, 11)
    assert kept.example(0, 11) is not late and np.array_equal(kept.example(0, 11).token_ids, late.token_ids)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("kind", spaced.KINDS)
def test_rendered_texts_have_one_bos_and_one_eos(kind: str, ends: bool) -> None:
    tokenizer = spaced.tokenizer(kind, ends)
    of = Encoder(tokenizer, RendererChat(tokenizer, DEFAULT, {}, chosen=True), SftDataConfig(), 1000)
    for end in ("", "</s>", "</s>\n", "</s></s>"):
        found = of.example(Texts(prompt="<s>[INST]ab[/INST]", completion=f"hello{end}"), "row")
        tokens = tokenizer.convert_ids_to_tokens(found.token_ids.tolist())
        assert tokens[0] == "<s>" and tokens.count("<s>") == 1 and tokens[-1] == "</s>" and tokens.count("</s>") == 1
        assert of.decode(found.token_ids[found.loss_mask].tolist(), begins=False) == "hello</s>"


def test_a_completion_that_ends_a_turn_gets_no_eos_behind_it() -> None:
    """Rendered beforehand with a template whose end of a turn is not the EOS."""
    tokenizer = markers.tokenizer("<|eos|>")
    chat = RendererChat(tokenizer, DEFAULT, {}, chosen=True)
    chat.stop_token_ids = (*chat.stop_token_ids, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    of = Encoder(tokenizer, chat, SftDataConfig(), 1000)
    found = of.example(Texts(prompt="<|im_start|>assistant\n", completion="yes<|im_end|>\n"), "row")
    assert of.decode(found.token_ids[found.loss_mask].tolist()) == "yes<|im_end|>"


def test_an_answer_that_already_ends_its_turn_has_one_end(tmp_path: Path) -> None:
    of = encoder(tmp_path)
    talk = Conversation(
        messages=({"role": "user", "content": "q"}, {"role": "assistant", "content": "abc<|eos|>"}),
        learned=(False, True),
    )
    assert of.example(talk, "row").token_ids.tolist() == of.example(TALK, "row").token_ids.tolist()
