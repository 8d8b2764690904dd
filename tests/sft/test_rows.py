"""Which rows are accepted, which parts are trained on, and what errors say about the others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.errors import ConfigError, DataError
from asyncrl.sft.rows import Conversation, SftRows, Texts
from tests.sft.given import rows_of, settings, write

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def opened(folder: Path, rows: Sequence[Mapping[str, Any]], *overrides: str) -> SftRows:
    return rows_of(settings(folder, *overrides, rows=rows))


def conversation(rows: SftRows, row: int = 0) -> Conversation:
    found = rows.form(row)
    assert isinstance(found, Conversation)
    return found


def test_messages_are_learned_in_every_turn_of_the_assistant_or_in_the_last(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, USER, ANSWER, USER, {**ANSWER, "weight": 0}, USER, ANSWER]
    rows = [{"messages": talk, "prompt": "also there"}]
    assert conversation(opened(tmp_path, rows)).learned == (False, False, True, False, False, False, True)
    assert conversation(opened(tmp_path, rows, "data.learn=last")).learned == (*([False] * 6), True)
    assert not any("weight" in message for message in conversation(opened(tmp_path, rows)).messages)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "image", "image": "a.png"}]}, "`content` of a message must be text"),
        ({"role": "user", "content": 5}, "`content` of a message must be text"),
        ({**ANSWER, "weight": "0"}, "`weight` of a message must be 0"),
        ({**ANSWER, "weight": 0.5}, "`weight` of a message must be 0"),
        ({"role": "assistant", "tool_calls": "add(1, 2)"}, "`tool_calls` must be a list"),
    ],
)
def test_what_a_template_would_write_as_it_is_is_refused_and_its_row_named(
    tmp_path: Path, message: dict[str, Any], said: str
) -> None:
    rows = opened(tmp_path, [{"messages": [USER, ANSWER]}, {"messages": [USER, message, ANSWER]}])
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{said}"):
        rows.check()


SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def test_conversations_of_sharegpt_are_the_messages_that_they_stand_for(tmp_path: Path) -> None:
    found = conversation(opened(tmp_path, [{"id": "x", "conversations": SHARED}]))
    assert found.messages == (USER, ANSWER) and found.learned == (False, True)
    talk = [*SHARED, *SHARED[:1], {**SHARED[1], "weight": 0}, *SHARED]
    rows = opened(tmp_path, [{"conversations": talk, "system": "s"}, {"conversations": SHARED, "system": ""}])
    rows.check()
    assert conversation(rows).messages[0] == {"role": "system", "content": "s"}
    assert conversation(rows).learned == (False, False, True, False, False, False, True)
    assert conversation(rows, 1).messages == (USER, ANSWER)
    own = [{"from": "system", "value": "of its own"}, *SHARED]
    found = conversation(opened(tmp_path, [{"conversations": own, "system": "s"}]))
    assert [message["content"] for message in found.messages] == ["of its own", "q", "a"]
    both = [{"conversations": SHARED, "prompt": "p", "completion": "c"}]
    assert opened(tmp_path, both).form(0) == Texts(prompt="p", completion="c")
    elsewhere = opened(tmp_path, [{"talk": SHARED}], "data.messages_column=talk")
    assert conversation(elsewhere).messages == (USER, ANSWER)


@pytest.mark.parametrize("wrong", [{"from": "function_call", "value": "{}"}, {"from": "gpt"}, {"from": None, "x": 1}])
def test_a_message_that_sharegpt_s_form_has_not_is_refused_with_the_way_out(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    rows = opened(tmp_path, [{"conversations": SHARED}, {"conversations": [*SHARED, wrong]}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: a message .*(`role` and `content`)"):
        rows.check()


@pytest.mark.parametrize("column", ["completion", "response"])
def test_a_prompt_and_what_follows_it_in_text_stay_texts(tmp_path: Path, column: str) -> None:
    rows = [{"prompt": "q>", column: "a", "extra_info": {"index": 3}}]
    assert opened(tmp_path, rows).form(0) == Texts(prompt="q>", completion="a")
    found = conversation(opened(tmp_path, rows, "data.chat=true"))
    assert found.messages == ({"role": "user", "content": "q>"}, ANSWER) and found.learned == (False, True)


def test_of_trl_s_conversational_form_the_completion_alone_is_learned(tmp_path: Path) -> None:
    found = conversation(opened(tmp_path, [{"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}]))
    assert found.learned == (False, False, False, True)
    found = conversation(opened(tmp_path, [{"prompt": [USER], "completion": "a"}]))
    assert found.messages == (USER, ANSWER)


def test_verl_s_columns_in_columns_are_named_with_dots(tmp_path: Path) -> None:
    rows = [{"prompt": [USER], "extra_info": {"question": "1+1", "answer": "2"}}]
    named = ["data.prompt_column=extra_info.question", "data.completion_column=extra_info.answer"]
    assert opened(tmp_path, rows, *named).form(0) == Texts(prompt="1+1", completion="2")


def test_parquet_s_empty_fields_are_no_fields_and_tools_may_be_json_text(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "r"}, ANSWER]
    tools = json.dumps([{"type": "function", "function": {"name": "f"}}])
    given = settings(tmp_path)
    pq.write_table(pa.Table.from_pylist([{"messages": talk, "tools": tools}]), tmp_path / "rows.parquet")
    given.data.path = str(tmp_path / "rows.parquet")
    found = conversation(rows_of(given))
    assert [sorted(message) for message in found.messages] == [
        ["content", "role"],
        ["content", "role", "tool_calls"],
        ["content", "role"],
        ["content", "role"],
    ]
    assert found.learned == (False, True, False, True) and found.tools[0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, r"rows\.jsonl:2 .*no column `prompt`|rows\.jsonl:2 has neither"),
        ({"prompt": "q", "answer": "a"}, r"rows\.jsonl:2 has no column `completion` or `response`.*completion_column="),
        ({"prompt": "q", "completion": ""}, r"rows\.jsonl:2: `completion` is empty"),
        ({"prompt": "q", "completion": "cut \ud83d"}, r"rows\.jsonl:2: `completion` contains half a character"),
        ({"prompt": "", "completion": "a"}, r"rows\.jsonl:2: `prompt` is empty"),
        ({"prompt": 3, "completion": "a"}, r"rows\.jsonl:2: `prompt` must be text or a non-empty list"),
        ({"prompt": [USER], "completion": [USER]}, r"rows\.jsonl:2: no message is an assistant's"),
        ({"prompt": [USER], "completion": [{**ANSWER, "content": ""}]}, r"message 1, an assistant's, is empty"),
        ({"prompt": [{"content": "q"}], "completion": "a"}, r"rows\.jsonl:2: a message needs `role` and `content`"),
        (
            {"prompt": [USER], "completion": "a", "tools": "[" * 100_000},
            r"rows\.jsonl:2: `tools` is text, but not valid JSON",
        ),
        ({"prompt": [USER], "completion": "a", "tools": "{"}, r"rows\.jsonl:2: `tools` is text, but not valid JSON"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_the_way_out(tmp_path: Path, row: dict, said: str) -> None:
    rows = opened(tmp_path, [{"prompt": "q", "completion": "a"}, row])
    with pytest.raises(DataError, match=said):
        rows.check()


def test_conversations_without_an_assistant_or_in_another_form_than_the_first_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no message is an assistant's \(roles: user\)"):
        opened(tmp_path, [{"messages": [USER]}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2 has no column `messages`"):
        opened(tmp_path, [{"messages": [USER, ANSWER]}, {"prompt": "q", "completion": "a"}]).check()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.learn=first", "data.learn must be one of every, last"),
        ("data.max_tokens=1", "data.max_tokens must be at least 2"),
        ("learner.epochs=0", "learner.epochs must be above 0"),
        ("eval.every=3", "needs held-out rows"),
        ("learner.keep_best=eval/heldout/loss", "Give eval.path=FILE"),
        (
            "eval.path=x learner.keep_best=eval/heldout/acc",
            "The evaluation measures eval/heldout/loss and eval/heldout/token_accuracy",
        ),
        ("rollout.group_size=4", "there is no setting `rollout.group_size`"),
        ("learner.batch_size=4", "Did you mean `learner.rows_per_step`"),
        ("data.max_length=4", "Did you mean `data.max_tokens`"),
        ("learner.lr=fast", "learner.lr=fast"),
        ("run.name=a/b", "run.name must be"),
    ],
)
def test_a_setting_that_is_none_here_is_refused(tmp_path: Path, setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        settings(tmp_path, *setting.split())


def test_a_mixture_needs_no_path_and_its_sources_are_filtered_and_named(tmp_path: Path) -> None:
    settings(tmp_path)
    write(tmp_path / "b.jsonl", [{"q": "x", "completion": "y", "level": level} for level in (1, 2, 3)])
    given = settings(tmp_path)
    given.data.path, given.data.where = "", {}
    given.data.mixture = {"b": {"path": str(tmp_path / "b.jsonl"), "prompt_column": "q", "where": {"level": [2, 3]}}}
    rows = rows_of(given)
    assert len(rows) == 2 and rows.form(0) == Texts(prompt="x", completion="y")


def test_a_conversation_s_own_options_of_the_template_are_refused(tmp_path: Path) -> None:
    row = {"messages": [USER, ANSWER]}
    rows = opened(tmp_path, [row, {**row, "chat_template_kwargs": {"enable_thinking": False}}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2 .*column `chat_template_kwargs`.*model\.chat"):
        rows.check()


@pytest.mark.parametrize(
    "row", [{"messages": [USER, {**ANSWER, "content": " \n"}]}, {"prompt": "q>", "completion": " \n"}]
)
def test_an_answer_of_white_space_alone_is_an_empty_one(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .* is empty"):
        opened(tmp_path, [row]).check()
