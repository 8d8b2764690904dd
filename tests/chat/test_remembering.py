"""A tokenizer that remembers gives renderers the same answers as the plain tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.chat.remembering import SHORT, Remembering
from asyncrl.chat.renderer import RendererChat
from tests.chat.markers import tokenizer

TEXTS = ["", "a", "hello", "<|im_start|>assistant\n", "<think>", "é\u200b", "x" * SHORT, "y" * (SHORT + 1)]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_tokenizer_the_first_time_and_the_next(text: str) -> None:
    plain, kept = tokenizer(), Remembering(tokenizer())
    for _ in range(2):
        assert kept.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)
        assert kept.encode(text) == plain.encode(text)
        said = kept(text, add_special_tokens=False, return_offsets_mapping=True)
        assert said["offset_mapping"] == plain(text, return_offsets_mapping=True)["offset_mapping"]
        assert kept.convert_tokens_to_ids(text) == plain.convert_tokens_to_ids(text)
        assert kept.convert_tokens_to_ids([text]) == plain.convert_tokens_to_ids([text])
    assert len(kept) == len(plain) and kept.eos_token == plain.eos_token
    assert kept.unk_token_id == plain.unk_token_id


def test_who_changes_ids_that_it_was_given_changes_nobody_elses() -> None:
    kept = Remembering(tokenizer())
    kept.encode("hello", add_special_tokens=False).append(7)
    assert kept.encode("hello", add_special_tokens=False) == tokenizer().encode("hello", add_special_tokens=False)


def test_a_marker_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = tokenizer("<|im_end|>")
    encode = plain.encode
    monkeypatch.setattr(plain, "encode", lambda text, **given: asked.append(text) or encode(text, **given))
    kept = Remembering(plain)
    for _ in range(3):
        kept.encode("<|im_start|>assistant\n", add_special_tokens=False)
    assert asked == ["<|im_start|>assistant\n"]


def test_the_opening_that_siblings_share_is_rendered_once_and_no_other_is_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talk = RendererChat(tokenizer("<|im_end|>"), "qwen3", {}, chosen=True)
    rendered = 0
    render = talk._renderer.render_ids

    def counted(*args: Any, **given: Any) -> list[int]:
        nonlocal rendered
        rendered += 1
        return render(*args, **given)

    monkeypatch.setattr(talk._renderer, "render_ids", counted)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    first = talk.render(messages)
    again = talk.render([dict(each) for each in messages])
    assert rendered == 1 and first == again
    again.append(0)
    assert talk.render(messages) == first
    messages[0]["content"] = "ho"
    assert talk.render(messages) != first
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": 1}}}
    other = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": True}}}
    assert talk.render(messages, [tool]) != talk.render(messages, [other]) != talk.render(messages)


def test_the_tokenizers_of_this_transformers_are_asked_beneath_it() -> None:
    assert Remembering(tokenizer())._backend is tokenizer().backend_tokenizer


def test_a_tokenizer_that_was_told_to_cut_is_asked_itself() -> None:
    plain = tokenizer.__wrapped__()  # one of its own: others keep theirs
    kept = Remembering(plain)
    plain.backend_tokenizer.enable_truncation(2)
    kept("hello there", add_special_tokens=False, return_offsets_mapping=True)
    assert plain.backend_tokenizer.truncation is None  # by transformers, which was asked
