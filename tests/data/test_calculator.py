"""The calculator's agent: rows, conversations, and a tokenizer in which a call is a handful of tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

from transformers import AutoTokenizer

from asyncrl.chat.renderer import RendererChat
from asyncrl.data.byte_tokenizer import EOS_ID, save_byte_tokenizer
from asyncrl.data.calculator import (
    CHAT_TEMPLATE,
    END,
    PHRASES,
    is_held_out,
    result,
    right_conversation,
    sample_expression,
    warmup_conversation,
    write_sums,
)


def test_the_files_have_right_answers_no_expression_twice_and_none_in_both(tmp_path: Path) -> None:
    write_sums(tmp_path, seed=1, train_rows=300, eval_rows=40)
    train, heldout = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    asked = [row["prompt"][0]["content"] for row in train + heldout]
    assert (len(train), len(heldout), len(set(asked))) == (300, 40, 340)
    assert [is_held_out(each) for each in asked] == [False] * 300 + [True] * 40
    assert (result("37*52"), result("10-99"), result("99+99")) == ("1924", "-89", "198")
    assert all(row["answer"] == result(each) for row, each in zip(train + heldout, asked, strict=True))


def test_the_warm_up_mostly_guesses_and_of_its_calls_few_are_answered_by_what_they_gave() -> None:
    rng = random.Random(0)
    made = [warmup_conversation(rng) for _ in range(4000)]
    assert not any(is_held_out(parts[0][0].rstrip(">")) for parts in made)
    calls = [parts for parts in made if len(parts) == 4]
    right = [parts for parts in calls if parts == right_conversation(parts[0][0].rstrip(">"))]
    assert 0.35 < len(calls) / len(made) < 0.45 and 0.08 < len(right) / len(made) < 0.15


def test_a_conversation_of_the_warm_up_is_what_the_chat_makes_of_its_turns(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, PHRASES, CHAT_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    chat = RendererChat(tokenizer, "default", {"tool_parser": "qwen3"}, chosen=True)
    (asked, _), (call, _), (given, _), (said, _) = right_conversation("37*52")

    prompt = chat.render([{"role": "user", "content": "37*52"}])
    assert tokenizer.decode(prompt) == asked
    sampled = chat.encode(call, add_special_tokens=False)
    assert len(sampled) == 5 + len(PHRASES) + 1 and sampled[-1] == EOS_ID
    reply = chat.parse(sampled, prompt=prompt, finish_reason="stop")
    (made,) = reply.tool_calls
    assert (made.name, made.arguments, made.error) == ("calculate", {"expression": "37*52"}, "")
    answer = {"role": "tool", "tool_call_id": made.id, "name": made.name, "content": "1924"}
    assert tokenizer.decode(chat.extend(prompt, sampled, [answer])) == given
    assert said == f"1924{END}"


def test_expressions_of_the_wanted_set_are_sampled() -> None:
    rng = random.Random(0)
    assert all(is_held_out(sample_expression(rng, held_out=True)) for _ in range(20))
