"""Data as users bring it: parquet, saved datasets, folders, and classes of their own."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.checks.sources import Source, places
from asyncrl.data.probe import look_over
from asyncrl.data.rows import arrow
from asyncrl.data.rows.base import plain
from asyncrl.data.rows.messages import tools_of
from asyncrl.data.rows.opening import open_source
from asyncrl.data.rows.view import PromptRows, checked_prompt
from asyncrl.errors import ConfigError, DataError
from asyncrl.rewards.wire import FrameBuffer, pack_frame

OWN = """
import numpy as np
class Rows:
    def __init__(self, count, bad=-1):
        self.count, self.bad = count, bad
    def __len__(self):
        return self.count
    def __getitem__(self, row):
        if row == self.bad:
            raise KeyError("lost")
        return {"prompt": f"{row}>", "answer": np.int64(row), "vector": np.arange(3)}
class Long:
    def __len__(self):
        return 1
    def __getitem__(self, row):
        return {"prompt": "2^70?", "answer": 2**70}
class Endless:
    def __getitem__(self, row):
        return {"prompt": "x"}
class Ends:
    def __len__(self):
        import os
        os._exit(5)
"""


def source(*specs: str | Path, **settings: Any) -> Source:
    return Source(key="data.path", specs=tuple(map(str, specs)), **settings)


def opened(*specs: str | Path, **settings: Any) -> PromptRows:
    return open_source(source(*specs, **settings))


def gsm8k_row(split: str, number: int) -> dict[str, Any]:
    """As verl's preprocess of GSM8K makes it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "user", "content": f'What is {number} + 1? Let\'s think step by step, answer after "####".'}
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"split": split, "index": number, "answer": f"#### {number + 1}", "question": f"{number} + 1?"},
    }


def verl_parquet(path: Path, count: int, split: str = "train", per_group: int = 1000) -> Path:
    pq.write_table(pa.Table.from_pylist([gsm8k_row(split, n) for n in range(count)]), path, row_group_size=per_group)
    return path


def test_verls_parquet_is_read_as_it_is_and_of_plain_types_alone(tmp_path: Path) -> None:
    rows = opened(verl_parquet(tmp_path / "train.parquet", 25, per_group=10))
    rows.check()
    assert len(rows) == 25
    for number in (24, 0, 13, 9, 10):
        assert rows[number] == gsm8k_row("train", number)
        pack_frame([rows[number]])  # what carries a row to its reward takes no array and no number of numpy
    assert type(rows[3]["extra_info"]["index"]) is int and type(rows[3]["prompt"]) is list
    assert rows.where(7) == f"{tmp_path}/train.parquet[7]"
    assert [row["reward_model"]["ground_truth"] for row in rows.scan(["reward_model"])] == [
        str(n + 1) for n in range(25)
    ]


def test_row_groups_are_decoded_when_asked_for_and_few_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = arrow.ParquetFile(verl_parquet(tmp_path / "train.parquet", 100, per_group=10), kept_bytes=1)
    decoded: list[int] = []
    read = arrow.pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        arrow.pq.ParquetFile, "read_row_group", lambda self, group: decoded.append(group) or read(self, group)
    )
    assert [file[row]["extra_info"]["index"] for row in (5, 7, 95, 5)] == [5, 7, 95, 5]
    assert decoded == [0, 9, 0]
    generous = arrow.ParquetFile(tmp_path / "train.parquet")
    assert [generous[row]["extra_info"]["index"] for row in (5, 95, 5, 93)] == [5, 95, 5, 93]
    assert decoded[3:] == [0, 9]


def test_values_of_arrow_and_numpy_become_plain_ones() -> None:
    given = {"a": np.float32(0.5), "b": np.asarray([[1, 2]]), "c": (1, "x"), "d": datetime.date(2026, 1, 2), "e": None}
    made = plain(given)
    assert made == {"a": 0.5, "b": [[1, 2]], "c": [1, "x"], "d": "2026-01-02", "e": None}
    assert type(made["a"]) is float and type(made["b"][0][0]) is int
    assert plain([datetime.timedelta(minutes=1.5), UUID(int=5)]) == [90.0, str(UUID(int=5))]
    with pytest.raises(TypeError, match="is a object"):
        plain([object()])


def test_a_value_that_python_has_none_for_is_refused_with_its_row_and_columns(tmp_path: Path) -> None:
    far = pa.array([0, 2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "seen": far}), tmp_path / "far.parquet")
    rows = opened(tmp_path / "far.parquet")
    assert rows[0]["seen"] == "1970-01-01T00:00:00"
    with pytest.raises(DataError, match=r"far\.parquet\[1\]: a value in the columns prompt, seen cannot be read"):
        rows[1]


def test_integers_of_any_size_reach_a_reward(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(OWN)
    row = {"prompt": "2^70?", "answer": 2**70, "low": [-(3**99)], "word": "\ud83d"}
    (frame,) = FrameBuffer().feed(pack_frame([row]))
    assert frame == [row]
    long = look_over(source(f"{tmp_path}/rows.py:Long"), "", limit=9)
    assert long.first_rows[0][1]["answer"] == 2**70


def test_a_folder_of_save_to_disk_is_read_without_its_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}?"}], "solution": str(n), "level": n % 3, "embedding": [0.5, n]}
        for n in range(40)
    ]
    datasets.Dataset.from_list(rows).filter(lambda row: row["level"] < 2).save_to_disk(tmp_path / "ds", num_shards=3)
    read = opened(tmp_path / "ds")
    read.check()
    assert [read[n] for n in range(len(read))] == [row for row in rows if row["level"] < 2]
    assert next(iter(read.scan(["level"]))) == {"level": 0}
    split = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    split.save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"holds the splits train .*data\.path=.*splits/train"):
        opened(tmp_path / "splits")
    assert len(opened(tmp_path / "splits" / "train")) == 40
    next((tmp_path / "ds").glob("data-00001*")).unlink()
    with pytest.raises(DataError, match=r"cannot read .*data-00001"):
        opened(tmp_path / "ds")


def test_several_files_a_glob_and_a_folder_are_one_source_in_order(tmp_path: Path) -> None:
    verl_parquet(tmp_path / "train-1.parquet", 3)
    (tmp_path / "train-0.jsonl").write_text("".join(json.dumps(gsm8k_row("train", 10 + n)) + "\n" for n in range(2)))
    both = opened(tmp_path / "train-1.parquet", tmp_path / "train-0.jsonl")
    assert [both[n]["extra_info"]["index"] for n in range(5)] == [0, 1, 2, 10, 11]
    assert both.where(4) == f"{tmp_path}/train-0.jsonl:2"
    assert [row["extra_info"]["index"] for row in both.scan(["extra_info"])] == [0, 1, 2, 10, 11]
    assert len(opened(tmp_path / "train-*")) == 5
    with pytest.raises(DataError, match="files of several kinds"):
        opened(tmp_path)
    (tmp_path / "train-0.jsonl").unlink()
    assert len(opened(tmp_path)) == 3
    verl_parquet(tmp_path / "test-0.parquet", 3)
    with pytest.raises(DataError, match=r"several splits \(test-0.parquet, train-1.parquet\)"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rows.csv", r"are read from \.jsonl, .*not from \.csv"),
        ("nothing.parquet", "there is no such file .*Give an existing"),
        ("none-*.jsonl", "no file matches"),
        ("empty", r"has no \.jsonl"),
        ("empty.parquet", "has no rows"),
        ("damaged.parquet", "cannot read .*damaged.parquet"),
        ("empty.jsonl", "has no rows"),
        ("gone.py:Rows", "there is no file gone.py"),
        ("hf:a:b:c:d", "is not a name on the hub"),
    ],
)
def test_what_cannot_be_read_is_said_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    Path("rows.csv").write_text("prompt\nx\n")
    Path("empty.jsonl").write_text("\n")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), "empty.parquet")
    whole = verl_parquet(Path("whole.parquet"), 100).read_bytes()
    Path("damaged.parquet").write_bytes(whole[: len(whole) // 2])
    if spec.startswith("hf:"):
        pytest.importorskip("datasets")
    with pytest.raises(DataError, match=says):
        opened(spec)


def test_a_dataset_of_the_hub_without_a_network_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = pytest.importorskip("asyncrl.data.rows.hub")

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(hub.datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"hf:openai/gsm8k:main:train cannot be loaded .*Couldn't reach.*save_to_disk"):
        opened("hf:openai/gsm8k:main:train")
    asked: list[tuple[object, ...]] = []

    def found(name: str, config: str | None, split: str) -> Any:
        asked.append((name, config, split))
        return hub.datasets.Dataset.from_list([{"question": "2?", "answer": "2"}])

    monkeypatch.setattr(hub.datasets, "load_dataset", found)
    assert opened("hf:openai/gsm8k:main:test", prompt_column="question")[0]["prompt"] == "2?"
    opened("hf:a/b", prompt_column="question")
    assert asked == [("openai/gsm8k", "main", "test"), ("a/b", None, "train")]


def test_the_column_of_the_prompt_may_have_another_name_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "2+2?", "answer": "4"}\n')
    with pytest.raises(DataError, match=r"no column `prompt` \(columns: answer, question\)\. .*data\.prompt_column"):
        opened(file)
    assert opened(file, prompt_column="question")[0] == {"question": "2+2?", "answer": "4", "prompt": "2+2?"}
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    file.write_text(json.dumps({"messages": talk[:1]}) + "\n" + json.dumps({"messages": talk}) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: `messages` ends with the assistant's answer"):
        opened(file, prompt_column="messages").check()
    file.write_text(json.dumps({"prompt": talk}) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: `prompt` ends with the assistant's answer"):
        opened(file).check()


def test_prompts_of_two_forms_in_one_source_are_refused_by_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": [{"role": "user", "content": "b"}]}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:3: the prompt is a list of messages, and that of .*:1 is text"):
        opened(file).check()


def test_rows_of_a_class_of_the_users_are_made_plain_and_named_by_number(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    rows = opened(f"{tmp_path}/mine.py:Rows", args={"count": 5, "bad": 3})
    assert rows[4] == {"prompt": "4>", "answer": 4, "vector": [0, 1, 2]} and type(rows[4]["answer"]) is int
    with pytest.raises(DataError, match=r"mine\.py:Rows\[3\] failed: KeyError: 'lost'"):
        rows.check()
    with pytest.raises(ConfigError, match=r"len\(Rows\(wrong=1\)\) failed: TypeError.*data\.args"):
        opened(f"{tmp_path}/mine.py:Rows", args={"wrong": 1})
    with pytest.raises(ConfigError, match="has no len"):
        opened(f"{tmp_path}/mine.py:Endless")


def test_a_class_of_the_users_is_looked_over_by_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "open(__file__ + '.ran', 'a').write(str(__import__('os').getpid()) + ' ')\n" + OWN
    )
    found = look_over(source(f"{tmp_path}/mine.py:Rows", args={"count": 5}), str(tmp_path), limit=10)
    assert (found.rows, found.first_rows[1]) == (
        5,
        (f"{tmp_path}/mine.py:Rows[1]", plain({"prompt": "1>", "answer": 1, "vector": [0, 1, 2]})),
    )
    pids = (tmp_path / "mine.py.ran").read_text().split()
    assert len(pids) == 1 and pids[0] != str(__import__("os").getpid())
    with pytest.raises(DataError, match=r"Rows\[2\] failed"):
        look_over(source(f"{tmp_path}/mine.py:Rows", args={"count": 5, "bad": 2}), str(tmp_path), limit=10)
    with pytest.raises(DataError, match=r"Rows\[0\]: data\.order_by=level .*it has answer, prompt, vector"):
        look_over(source(f"{tmp_path}/mine.py:Rows", args={"count": 5}), str(tmp_path), limit=10, order_by="level")
    with pytest.raises(ConfigError, match=r"ended its process \(exit code 5\)"):
        look_over(source(f"{tmp_path}/mine.py:Ends"), str(tmp_path), limit=10)


def test_a_name_with_glob_letters_that_is_a_file_is_that_file(tmp_path: Path) -> None:
    file = tmp_path / "rows[1].jsonl"
    file.write_text('{"prompt": "a"}\n')
    assert [place.path for place in places(source(file))] == [str(file)]


CALLS = (("weather", {"city": "Oslo"}), ("add", {"a": 1, "b": 2}), ("now", {}), ("find", {"in": {"word": "x"}}))


def talk(name: str, arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]


def tool(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": "string", **({"enum": ["x"]} if key == "a" else {})} for key in arguments}
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def tool_rows() -> list[dict[str, Any]]:
    made = [{"prompt": talk(*call), "tools": [tool(*call)], "extra_info": {call[0]: "x"}} for call in CALLS]
    return [*made, {"prompt": talk(*CALLS[0])[:1], "tools": [], "extra_info": {}}]


@pytest.mark.parametrize("form", ["parquet", "saved", "own"])
def test_a_tool_call_has_its_own_arguments_alone_in_every_form(form: str, tmp_path: Path) -> None:
    """Arrow gives each call the arguments of all others, as nulls, and each schema the properties of all others."""
    table = pa.Table.from_pylist(tool_rows())
    if form == "saved":
        (tmp_path / "d").mkdir()
        with pa.OSFile(str(tmp_path / "d" / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
        (tmp_path / "d" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        (tmp_path / "d" / "dataset_info.json").write_text("{}")
        rows = opened(tmp_path / "d")
    else:
        pq.write_table(table, tmp_path / "d.parquet")
        read = f"return pq.read_table({str(tmp_path / 'd.parquet')!r}).to_pylist()"
        (tmp_path / "own.py").write_text(f"import pyarrow.parquet as pq\ndef rows(): {read}")
        rows = opened(tmp_path / "d.parquet" if form == "parquet" else f"{tmp_path}/own.py:rows")
    for number, row in enumerate(tool_rows()):
        for found in (rows[number], list(rows.scan(["prompt", "tools"]))[number]):
            prompt = checked_prompt(found["prompt"], "prompt", "row")
            assert prompt == checked_prompt(row["prompt"], "prompt", "row")
            assert list(tools_of(found, "row")) == row["tools"]
    assert rows[0]["extra_info"]["add"] is None, "what rewards read is as the format defines it"


def test_a_null_that_the_author_of_a_jsonl_file_wrote_stays_in_calls_and_schemas(tmp_path: Path) -> None:
    schema = tool("find", {"in": 1})
    schema["function"]["parameters"]["properties"]["in"]["default"] = None
    row = {"prompt": talk("find", {"in": None}), "tools": [schema]}
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    found = opened(tmp_path / "d.jsonl")[0]
    assert found["prompt"][1]["tool_calls"][0]["function"]["arguments"] == {"in": None}
    assert tools_of(found, "row") == (schema,)


def test_columns_of_the_arrow_json_type_become_the_objects_that_were_stored(tmp_path: Path) -> None:
    """`datasets` stores objects that differ from row to row as JSON, also within messages; a null there is a value."""

    def stored(*values: Any) -> pa.Array:
        texts = pa.array([None if each is None else json.dumps(each) for each in values], pa.utf8())
        return pa.ExtensionArray.from_storage(pa.json_(), texts)

    message = pa.StructArray.from_arrays(
        [pa.array(["user", "user"]), pa.array(["a", "b"]), stored({"c": None}, None)],
        names=["role", "content", "extra"],
    )
    table = pa.table(
        {
            "prompt": pa.ListArray.from_arrays(pa.array([0, 1, 2]), message),
            "answer": stored("abc", {"n": [1, None]}),
            "many": pa.ListArray.from_arrays(pa.array([0, 2, 2]), stored(1, "x")),
            "talk": stored([{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]),
        }
    )
    pq.write_table(table, tmp_path / "d.parquet")
    rows = opened(tmp_path / "d.parquet")
    assert rows[0] == {
        "prompt": [{"role": "user", "content": "a", "extra": {"c": None}}],
        "answer": "abc",
        "many": [1, "x"],
        "talk": [{"role": "user", "content": "hi"}],
    }
    assert rows[1]["answer"] == {"n": [1, None]} and rows[1]["prompt"] == [{"role": "user", "content": "b"}]
    assert opened(tmp_path / "d.parquet", prompt_column="talk")[1]["prompt"] == [{"role": "user", "content": "ho"}]


def test_messages_that_are_stored_as_json_text_are_messages(tmp_path: Path) -> None:
    """Otherwise the policy would read brackets and quotation marks."""
    said = [{"role": "user", "content": "hi"}]
    texts = ["[1, 2] is a list. Sum it", '[{"a": 1}]', "[", "plain"]
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": json.dumps(said)}) + "\n")
    assert opened(tmp_path / "d.jsonl")[0]["prompt"] == said
    assert [checked_prompt(text, "prompt", "row") for text in texts] == texts


def test_tools_and_their_parameters_may_each_be_json_text() -> None:
    """Stored so where Arrow would unify them; a template would quote them."""
    (wanted,) = tools = (tool("add", {"a": 1, "b": 2}),)
    inner = {**wanted["function"], "parameters": json.dumps(wanted["function"]["parameters"])}
    for given in ([{**wanted, "function": inner}], [json.dumps(wanted)], json.dumps([{**wanted, "function": inner}])):
        assert tools_of({"tools": given}, "row") == tools
    assert tools_of({"tools": [inner]}, "row") == (wanted["function"],)
    with pytest.raises(DataError, match=r"row: the `parameters` of a tool in `tools` must be an object .*got 'a: int'"):
        tools_of({"tools": [{"name": "f", "parameters": "a: int"}]}, "row")


def test_a_row_s_own_options_of_the_chat_template_are_refused_not_ignored(tmp_path: Path) -> None:
    said = {"prompt": [{"role": "user", "content": "hi"}]}
    made = [{**said, "chat_template_kwargs": each} for each in (None, {}, {"enable_thinking": False})]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made[:2]))
    opened(tmp_path / "d.jsonl").check()
    pq.write_table(pa.Table.from_pylist([made[0], made[2]]), tmp_path / "d.parquet")
    with pytest.raises(
        DataError, match=r"\[1\] has .*'enable_thinking': False.*set model\.chat\.NAME=VALUE for all rows"
    ):
        opened(tmp_path / "d.parquet").check()
    (tmp_path / "t.jsonl").write_text(json.dumps({**made[2], "prompt": "text"}) + "\n")
    opened(tmp_path / "t.jsonl").check()
