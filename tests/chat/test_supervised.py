"""Conversations from elsewhere: the tokens trained on are those that the policy would sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.chat.base import ChatError, Message
from asyncrl.chat.choice import open_chat
from asyncrl.chat.names import DEFAULT, RENDERERS
from asyncrl.chat.renderer import RendererChat
from asyncrl.chat.supervised import Supervised
from asyncrl.data.local_tokenizer import LocalTokenizer
from asyncrl.quickstart.byte_tokenizer import CHAT_TEMPLATE, EOS_ID
from tests.chat.markers import tokenizer

OFFLINE = sorted(set(RENDERERS) - {DEFAULT, "gpt-oss"})
"""gpt-oss loads its vocabulary from the network."""
WITHOUT_REASONING = ("deepseek-r1", "glm-5", "minimax-m2", "nemotron-", "qwen3.5", "qwen3.6", "qwen3.8")
"""Begin the reasoning when they ask for a turn."""
TALK: list[Message] = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "FIRST ANSWER"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "SECOND ANSWER"},
]
BOTH, LAST = (False, True, False, True), (False, False, False, True)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def by_template(template: str, eos: str = "<|eos|>") -> RendererChat:
    return RendererChat(tokenizer(eos, template), DEFAULT, {}, chosen=True)


def learned_text(of: RendererChat, found: Supervised) -> str:
    return of.decode([token for token, learned in zip(found.token_ids, found.loss_mask, strict=True) if learned])


def runs(mask: Sequence[bool]) -> int:
    """Of learned tokens in a row."""
    return sum(now and not before for before, now in zip([False, *mask], mask, strict=False))


@pytest.mark.parametrize("name", OFFLINE)
def test_what_is_learned_follows_the_prompt_that_a_rollout_would_have_had(name: str) -> None:
    of = RendererChat(tokenizer(), name, {}, chosen=True)
    found = of.supervise(TALK[:2], learned=BOTH[:2])
    assert any(found.loss_mask) and found.loss_mask[-1] and len(found.token_ids) == len(found.loss_mask)
    text = learned_text(of, found)
    assert "FIRST ANSWER" in text and "question" not in text
    assert found.token_ids[-1] in of.stop_token_ids, "nothing would teach it to stop"
    prompt = of.render(TALK[:1])
    assert found.as_asked == (list(found.token_ids[: len(prompt)]) == prompt)
    assert found.as_asked or name.startswith(("laguna", *WITHOUT_REASONING))
    assert not found.as_asked or found.loss_mask.index(True) >= len(prompt)
    if name.startswith(WITHOUT_REASONING) and name != "deepseek-r1":  # that one has no reasoning in what is done
        found = of.supervise([TALK[0], TALK[1] | {"reasoning_content": "hm"}], learned=BOTH[:2])
        assert found.as_asked and "hm" in learned_text(of, found)
        assert list(found.token_ids[: len(prompt)]) == prompt and not any(found.loss_mask[: len(prompt)])


@pytest.mark.parametrize("name", OFFLINE)
def test_the_last_turn_alone_is_learned_where_it_alone_is_asked_for(name: str) -> None:
    of = RendererChat(tokenizer(), name, {}, chosen=True)
    every, last = of.supervise(TALK, learned=BOTH), of.supervise(TALK, learned=LAST)
    assert every.token_ids == last.token_ids
    assert "FIRST" in learned_text(of, every) and "FIRST" not in learned_text(of, last)
    assert runs(every.loss_mask) == 2 and runs(last.loss_mask) == 1
    assert sum(every.loss_mask) > sum(last.loss_mask)


def test_a_template_s_turns_are_those_that_the_renderer_of_the_family_learns() -> None:
    """ChatML is what both write."""
    plain = by_template(CHATML, "<|im_end|>")
    found = plain.supervise(TALK, learned=BOTH)
    assert learned_text(plain, found) == "FIRST ANSWER<|im_end|>SECOND ANSWER<|im_end|>"
    rollout = plain.render(TALK[:1])
    answer = [*plain.encode("FIRST ANSWER<|im_end|>", add_special_tokens=False)]
    follows = plain.extend(rollout, answer, TALK[2:3])
    last = plain.encode("SECOND ANSWER<|im_end|>", add_special_tokens=False)
    assert list(found.token_ids) == [*rollout, *answer, *follows, *last], "not what a rollout of it would be"


def test_a_template_that_closes_no_turn_gets_the_eos_that_a_policy_samples() -> None:
    of = by_template(CHAT_TEMPLATE)
    found = of.supervise(TALK, learned=BOTH)
    rollout = of.render(TALK[:1])
    answer = [*of.encode("FIRST ANSWER", add_special_tokens=False), EOS_ID]
    follows = of.extend(rollout, answer, TALK[2:3])
    last = [*of.encode("SECOND ANSWER", add_special_tokens=False), EOS_ID]
    assert list(found.token_ids) == [*rollout, *answer, *follows, *last]
    assert learned_text(of, found) == "FIRST ANSWER<|eos|>SECOND ANSWER<|eos|>"
    ends_in_space = [TALK[0], {"role": "assistant", "content": "a \n"}]
    assert learned_text(of, of.supervise(ends_in_space, learned=BOTH[:2])) == "a \n<|eos|>"


def test_an_end_of_a_turn_that_is_special_but_no_named_token_is_the_end_of_the_turn() -> None:
    """Gemma's: the tokenizer's EOS is another token, and no turn has both, learned or continued."""
    of = by_template(CHATML)
    assert of.stop_token_ids == (EOS_ID, *of.encode("<|im_end|>", add_special_tokens=False))
    found = of.supervise(TALK, learned=BOTH)
    assert learned_text(of, found) == "FIRST ANSWER<|im_end|>SECOND ANSWER<|im_end|>"
    rollout = of.render(TALK[:1])
    answer = of.encode("FIRST ANSWER<|im_end|>", add_special_tokens=False)
    follows = of.extend(rollout, answer, TALK[2:3])
    last = of.encode("SECOND ANSWER<|im_end|>", add_special_tokens=False)
    assert list(found.token_ids) == [*rollout, *answer, *follows, *last]


def test_a_template_that_ends_every_conversation_with_the_eos_is_learned_turn_by_turn() -> None:
    """Phi's."""
    of = by_template(CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}"))
    found = of.supervise(TALK, learned=BOTH)
    assert learned_text(of, found) == "FIRST ANSWER<|im_end|>SECOND ANSWER<|im_end|>\n<|eos|>"
    assert of.decode(list(found.token_ids)).count("<|eos|>") == 1


def test_a_template_that_rewrites_earlier_turns_is_refused_but_for_the_last() -> None:
    forgets = CHATML.replace("m.content", "m.content if loop.last else m.content.split('</think>')[-1]")
    of = by_template(forgets, "<|im_end|>")
    reasoned = [m | {"content": f"<think>hm</think>{m['content']}"} if m["role"] == "assistant" else m for m in TALK]
    with pytest.raises(ChatError, match=r"data\.learn=last"):
        of.supervise(reasoned, learned=BOTH)
    assert learned_text(of, of.supervise(reasoned, learned=LAST)) == "<think>hm</think>SECOND ANSWER<|im_end|>"


def test_a_template_that_begins_a_turn_for_the_model_otherwise_than_it_writes_it_is_refused() -> None:
    of = by_template(CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"), "<|im_end|>")
    with pytest.raises(ChatError, match="message 1 differently from its generation prompt"):
        of.supervise(TALK, learned=BOTH)


def test_calls_whose_arguments_are_json_text_are_learned_and_what_a_tool_said_is_not() -> None:
    of = RendererChat(tokenizer(), "qwen3", {}, chosen=True)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 41})}}
    talk: list[Message] = [
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "add", "content": "RESULT"},
        TALK[3],
    ]
    text = learned_text(of, of.supervise(talk, learned=BOTH))
    assert '"arguments": {"a": 41}' in text and "RESULT" not in text and "SECOND ANSWER" in text
    assert isinstance(call["function"]["arguments"], str), "the row was written into"


def test_a_prompt_has_earlier_calls_as_a_template_writes_them_whether_their_arguments_are_json_text_or_not() -> None:
    """As a family's own renderer does; a template that writes `arguments | tojson` quoted such text once more."""
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}")
    of = by_template(template, "<|im_end|>")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 41}}}
    text = {**call, "function": {"name": "add", "arguments": json.dumps({"a": 41})}}
    asked = [[TALK[0], {"role": "assistant", "content": "", "tool_calls": [each]}, TALK[2]] for each in (call, text)]
    assert of.render(asked[0]) == of.render(asked[1]) and '"arguments": {"a": 41}' in of.decode(of.render(asked[1]))
    looked_at = LocalTokenizer(of._tokenizer.backend_tokenizer, {"default": template}, {})
    assert looked_at.render(asked[1]) == of.render(asked[1])


def test_without_a_template_a_conversation_is_refused_with_a_way_out(tmp_path: Path) -> None:
    of = open_chat(tokenizer("<|im_end|>"), str(tmp_path))
    with pytest.raises(ChatError, match="no chat template"):
        of.supervise(TALK, learned=BOTH)


def test_a_template_that_fails_on_a_message_says_what_to_mend() -> None:
    of = by_template("{{ messages[0].nothing.at_all }}")
    with pytest.raises(ChatError, match="cannot be rendered"):
        of.supervise(TALK, learned=BOTH)
