"""What ends a turn is derived from the template, whatever the tokenizer's EOS is."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.chat.base import ChatError
from asyncrl.chat.names import DEFAULT
from asyncrl.chat.renderer import RendererChat
from asyncrl.chat.turn_end import described
from asyncrl.data.local_tokenizer import load_local_tokenizer
from asyncrl.quickstart.byte_tokenizer import EOS_ID
from asyncrl.rollout.worker.tokenizer import make_decode
from tests.chat import markers
from tests.chat.templates import STYLES

TALK = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "TWO"}]
MORE = {"role": "user", "content": "AND THEN"}


def chat_of(style: str) -> RendererChat:
    return RendererChat(tokenizer_of(style), DEFAULT, {}, chosen=True)


@cache
def tokenizer_of(style: str) -> PreTrainedTokenizerFast:
    tokenizer = markers.tokenizer("<|eos|>", STYLES[style].template)
    tokenizer.bos_token = "<|bos|>"
    return tokenizer


def ids_of(chat: RendererChat, *tokens: str) -> set[int]:
    return {chat.encode(token, add_special_tokens=False)[0] for token in tokens}


@pytest.mark.parametrize("style", STYLES)
def test_a_template_says_what_ends_its_turns(style: str) -> None:
    chat = chat_of(style)
    assert {*chat.stop_token_ids} == {EOS_ID, *ids_of(chat, *STYLES[style].ends)}
    assert chat.stop_texts == ((STYLES[style].text,) if STYLES[style].text else ())


@pytest.mark.parametrize("style", STYLES)
def test_the_check_before_a_start_names_the_ends_that_the_workers_stop_at(style: str, tmp_path: Path) -> None:
    tokenizer_of(style).save_pretrained(tmp_path)
    local = load_local_tokenizer(tmp_path)
    chat = RendererChat(AutoTokenizer.from_pretrained(tmp_path), DEFAULT, {}, chosen=True)
    assert local is not None and local.stops({}) == ({*chat.stop_token_ids}, chat.stop_texts)


@pytest.mark.parametrize("style", sorted({*STYLES} - {"broken"}))
def test_what_is_taught_last_is_what_rollouts_stop_at(style: str) -> None:
    """Otherwise a model that has learned to end its turn would write on to the limit of tokens."""
    chat = chat_of(style)
    found = chat.supervise(TALK, learned=(False, True))
    learned = [token for token, mask in zip(found.token_ids, found.loss_mask, strict=True) if mask]
    assert chat.ends_turn(learned) and learned[-1] in chat.stop_token_ids
    first = next(place for place, token in enumerate(learned) if token in chat.stop_token_ids)
    said = learned if style == "several_tokens" else learned[: first + 1]
    text = make_decode(tokenizer_of(style), chat.end_texts)([np.asarray(said, np.int32)])[0]
    assert text == {"quoted": 'TWO"', "harmony": "finalTWO", "mistral": " TWO"}.get(style, "TWO")
    assert len(said) == len(learned) or style == "phi", "rollouts stop before the end of what is taught"


@pytest.mark.parametrize("style", sorted({*STYLES} - {"broken", "harmony", "open_last_turn"}))
def test_a_turn_that_ended_by_itself_is_ended_once_when_the_conversation_goes_on(style: str) -> None:
    chat, wanted = chat_of(style), STYLES[style]
    if wanted.text:
        said = chat.encode(f"TWO{wanted.text}", add_special_tokens=False)
    else:
        said = [
            *chat.encode(" TWO" if style == "mistral" else "TWO", add_special_tokens=False),
            *sorted(ids_of(chat, *(wanted.ends[:1] or ("<|eos|>",)))),
        ]
    assert chat.ends_turn(said) and not chat.ends_turn(chat.encode("TWO", add_special_tokens=False))
    prompt = chat.render(TALK[:1])
    whole = chat.decode([*prompt, *said, *chat.extend(prompt, said, [MORE])])
    if style not in ("none", "quoted"):  # these have no end, and keep the EOS that was sampled
        assert whole == chat.decode(chat.render([*TALK, MORE]))
    reply = chat.parse(said, prompt=prompt, finish_reason="stop")
    assert reply.content.strip() == "TWO"


@pytest.mark.parametrize("style", ["glm", "glm_calls", "open_last_turn"])
def test_a_turn_that_the_next_header_ends_is_taught_that_end_and_no_eos(style: str) -> None:
    """With the EOS in front of it, earlier turns had two ends, as no prompt has that this template renders."""
    chat = chat_of(style)
    talk = [*TALK, MORE, TALK[1]]
    found = chat.supervise(talk, learned=(False, True, False, True))
    learned = [token for token, mask in zip(found.token_ids, found.loss_mask, strict=True) if mask]
    assert chat.decode(learned) == f"TWO{STYLES[style].ends[0]}TWO<|eos|>"
    assert list(found.token_ids) == [*chat.render(talk[:3]), *chat.encode("TWO<|eos|>", add_special_tokens=False)]


def test_a_call_that_the_header_of_its_result_ends_is_taught_that_end() -> None:
    """Otherwise nothing ends a call but the EOS, and the model goes on with more calls or makes up their results."""
    chat = chat_of("glm_calls")
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"a": 1}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "2", "tool_call_id": "call00000"}
    found = chat.supervise([TALK[0], called, result, TALK[1]], learned=(False, True, False, True))
    learned = [token for token, mask in zip(found.token_ids, found.loss_mask, strict=True) if mask]
    assert chat.decode(learned) == (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|observation|>TWO<|eos|>'
    )


def test_an_end_of_several_tokens_is_taught_with_the_eos_behind_the_last_turn_alone() -> None:
    chat = chat_of("several_tokens")
    found = chat.supervise([*TALK, MORE, TALK[1]], learned=(False, True, False, True))
    learned = [token for token, mask in zip(found.token_ids, found.loss_mask, strict=True) if mask]
    assert chat.decode(learned) == "TWO[/assistant]TWO[/assistant]<|eos|>"
    prompt = chat.render(TALK[:1])
    said = chat.encode("TWO[/assistant]", add_special_tokens=False)
    assert list(found.token_ids[: len(prompt) + len(said)]) == [*prompt, *said]


def test_an_end_that_is_another_one_once_others_follow_is_refused_and_not_taught_as_the_eos() -> None:
    """Harmony's turns end with <|return|> at the end of a conversation, and with <|end|> before other messages."""
    chat = chat_of("harmony")
    talk = [*TALK, MORE, TALK[1]]
    with pytest.raises(ChatError, match=r"writes message 1 differently .* Train on the last turn only"):
        chat.supervise(talk, learned=(False, True, False, True))
    found = chat.supervise(talk, learned=(False, False, False, True))
    learned = [token for token, mask in zip(found.token_ids, found.loss_mask, strict=True) if mask]
    assert chat.decode(learned) == "<|channel|>final<|message|>TWO<|return|>"


def test_a_template_that_has_no_end_for_tool_calls_is_not_ended_by_the_first_of_several() -> None:
    chat = chat_of("calls_close_themselves")
    assert not ids_of(chat, "<tool_call|>") & {*chat.stop_token_ids}


def test_the_start_names_what_ends_a_turn() -> None:
    chat = chat_of("several_tokens")
    assert described((EOS_ID,), chat.stop_texts, chat.decode) == (
        f"a turn ends with '<|eos|>' ({EOS_ID}) or the text '[/assistant]'"
    )
    assert described((), (), chat.decode) == ""


def test_options_of_the_template_are_given_when_its_end_is_looked_for(tmp_path: Path) -> None:
    template = STYLES["chatml"].template.replace("<|im_end|>", "{{ '<|end|>' if short else '<|im_end|>' }}")
    tokenizer = markers.tokenizer("<|eos|>", template)
    chat = RendererChat(tokenizer, DEFAULT, {"short": True}, chosen=True)
    assert {*chat.stop_token_ids} == {EOS_ID, *ids_of(chat, "<|end|>")}
    tokenizer.save_pretrained(tmp_path)
    local = load_local_tokenizer(tmp_path)
    assert local is not None and local.stops({"short": True})[0] == {*chat.stop_token_ids}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|eos|>"
