from __future__ import annotations

import json

import pytest

from asyncrl.checks.sources import Source
from asyncrl.data.rows.opening import open_source
from asyncrl.data.rows.view import PromptRows
from asyncrl.errors import DataError


def opened(path) -> PromptRows:
    return open_source(Source(key="data.path", specs=(str(path),)))


def write(tmp_path, *lines: str):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_are_read_in_any_order_and_blank_lines_are_no_rows(tmp_path):
    file = opened(write(tmp_path, '{"prompt": "a"}', "", '{"prompt": "é☃", "answer": 2}', "  "))
    assert len(file) == 2
    assert file[1] == {"prompt": "é☃", "answer": 2}
    assert file[0] == {"prompt": "a"}
    assert file.where(1).endswith("rows.jsonl:3")


def test_the_last_line_needs_no_newline(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    assert opened(path)[1] == {"prompt": "b"}


def test_verl_rows_are_read_as_they_are(tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "think"}, {"role": "user", "content": "2+2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0, "split": "train"},
    }
    assert opened(write(tmp_path, json.dumps(row)))[0] == row


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{broken", "not valid JSON"),
        ("[1, 2]", "holds a list"),
        ('{"question": "a", "answer": 1}', "no column `prompt`.*answer, question"),
        ('{"prompt": ""}', "`prompt` is empty"),
        (r'{"prompt": "cut \ud83d"}', r"`prompt` contains half a character, '\\ud83d'"),
        (r'{"prompt": [{"role": "user", "content": [{"text": "\udc00"}]}]}', "`prompt` contains half a character"),
        ('{"prompt": 7}', "must be text or a non-empty list"),
        ('{"prompt": []}', "must be text or a non-empty list"),
        ('{"prompt": [{"role": "user"}]}', "needs `role` and `content`"),
        ('{"prompt": ["hi"]}', "needs `role` and `content`"),
        # A renderer leaves them out, a template writes their Python form: the policy would be asked something else.
        ('{"prompt": [{"role": "user", "content": 7}]}', "`content` of a message must be text"),
        ('{"prompt": [{"role": "user", "content": null}]}', "needs `role` and `content`"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image", "image": "a"}]}]}',
            "images are not supported",
        ),
        ('{"prompt": [{"role": "assistant", "tool_calls": "add(1)"}]}', "`tool_calls` must be a list"),
        ('{"prompt": "a", "deep": ' + "[" * 99_999 + "]" * 99_999 + "}", "not valid JSON.*recursion"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line(tmp_path, line, says):
    file = opened(write(tmp_path, '{"prompt": "fine"}', "", line))
    with pytest.raises(DataError, match=rf"rows\.jsonl:3.*{says}"):
        file.check()
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        opened(write(tmp_path, line))


def test_messages_have_one_form_however_they_were_written(tmp_path):
    """As parquet files fill fields up, and as OpenAI's API has parts of text."""
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?", "image": None}]
    given = [{"role": "user", "content": parts, "tool_calls": None}, {"role": "assistant", "content": None}]
    given[1]["tool_calls"] = [{"function": {"name": "add", "arguments": {}}}]
    given.append({"role": "tool", "content": "4"})
    (row,) = opened(write(tmp_path, json.dumps({"prompt": given}))).scan(["prompt"])
    rows = opened(write(tmp_path, json.dumps({"prompt": given})))
    rows.check()
    assert row["prompt"] == given, "what is read is as it is"
    assert rows[0]["prompt"] == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": given[1]["tool_calls"]},
        {"role": "tool", "content": "4"},
    ]


def test_a_file_that_is_written_into_while_it_is_read_is_told_as_that(tmp_path):
    lines = ['{"prompt": "a"}', json.dumps({"prompt": "a" * 1_000_000}), '{"prompt": "b"}']
    path = write(tmp_path, *lines)
    rows = opened(path)
    path.write_text("\n".join([" " + line for line in lines]) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:3 is not valid JSON .* The file was changed while it was in use"):
        rows[2]


def test_a_missing_or_empty_file_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(DataError, match=r"data\.path"):
        opened(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="has no rows"):
        opened(write(tmp_path, "", ""))
