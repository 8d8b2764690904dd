from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from asyncrl.chat.choice import open_chat
from asyncrl.chat.names import DEFAULT
from asyncrl.chat.renderer import RendererChat
from asyncrl.data.local_tokenizer import LocalTokenizer, load_local_tokenizer
from asyncrl.data.prompts import PromptSource, render
from asyncrl.data.rows.view import PromptRows
from asyncrl.data.truncation import cut_messages
from asyncrl.drawing.order import APART, epoch_order
from asyncrl.errors import DataError, OverlongError
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from tests.chat import spaced
from tests.chat.markers import tokenizer as byte_tokenizer_with_markers
from tests.rollout.rollout_fakes import dataset

QWEN3 = (Path(__file__).parents[1] / "chat" / "qwen3.jinja").read_text()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return open_chat(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), str(folder))


def source(tmp_path: Path, tokenizer, rows: list[dict], **settings) -> PromptSource:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptSource(dataset(path), tokenizer, **({"seed": 0, "shuffle": True, "max_prompt_tokens": 64} | settings))


@cache
def words(count: int) -> list[dict]:
    return [{"prompt": f"word {i}>", "answer": str(i)} for i in range(count)]


@given(rows=st.integers(1, 500), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**40))
def test_every_epoch_is_a_permutation_of_the_rows(rows, seed, epoch):
    assert sorted(epoch_order(rows, seed, epoch).tolist()) == list(range(rows))


def test_the_order_of_an_epoch_never_changes_between_versions():
    assert epoch_order(10, seed=7, epoch=3).tolist() == [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]


def test_epochs_and_seeds_have_different_orders():
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_large_seeds_that_are_neighbours_have_different_orders():
    assert len({tuple(epoch_order(50, 2**63 + seed, 0)) for seed in range(9)}) == 9
    # That of a second source is one of them, whatever was typed.
    assert len({tuple(epoch_order(50, seed + APART, 0)) for seed in range(9)}) == 9


def test_a_prompt_depends_on_its_index_only(tmp_path, tokenizer):
    first = source(tmp_path, tokenizer, words(10))
    forwards = [first[index].row for index in range(35)]
    other = source(tmp_path, tokenizer, words(10))
    assert [other[index].row for index in reversed(range(35))] == forwards[::-1]
    assert sorted(forwards[10:20]) == list(range(10))
    assert first[25].epoch == 2


def test_file_order_without_shuffle(tmp_path, tokenizer):
    plain = source(tmp_path, tokenizer, words(4), shuffle=False)
    assert [plain[index].row for index in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_text_prompt_goes_through_the_plain_tokenizer_with_all_its_columns(tmp_path, tokenizer):
    prompt = source(tmp_path, tokenizer, [{"prompt": "ab>", "answer": "ba", "nested": {"x": [1]}}])[0]
    assert prompt.token_ids.tolist() == [97, 98, 62]
    assert prompt.token_ids.dtype == "int32"
    assert (prompt.text, prompt.columns["nested"]) == ("ab>", {"x": [1]})


def test_messages_go_through_the_chat_template_with_a_generation_prompt(tmp_path, tokenizer):
    prompt = source(tmp_path, tokenizer, [{"prompt": [{"role": "user", "content": "hi"}]}])[0]
    assert prompt.text == "user: hi\nassistant: "
    assert bytes(prompt.token_ids.tolist()).decode() == prompt.text


LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"properties": {"q": {"type": "string"}}}}}
SAYS = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("given", [[LOOK_UP], json.dumps([LOOK_UP])])
def test_a_rows_own_tools_are_told_to_the_policy(tmp_path, given):
    qwen = byte_tokenizer_with_markers("<|im_end|>", QWEN3)
    rows = [{"prompt": SAYS, "tools": given}]
    expected = qwen.apply_chat_template(SAYS, tools=[LOOK_UP], add_generation_prompt=True, tokenize=False)
    assert "look_up" in expected
    for of in (RendererChat(qwen, "default", {}, chosen=True), RendererChat(qwen, "qwen3", {}, chosen=True)):
        drawn = source(tmp_path, of, rows, max_prompt_tokens=4000)[0]
        assert (drawn.text, drawn.columns["tools"]) == (expected, given)
    looked_at = LocalTokenizer(qwen.backend_tokenizer, {"default": QWEN3}, {})
    assert source(tmp_path, looked_at, rows, max_prompt_tokens=4000)[0].text == expected
    named = LocalTokenizer(qwen.backend_tokenizer, {"default": "plain", "tool_use": QWEN3}, {})
    assert source(tmp_path, named, rows, max_prompt_tokens=4000)[0].text == expected


@pytest.mark.parametrize("given", [[], None, ""])
def test_no_tools_are_none(tmp_path, tokenizer, given):
    assert source(tmp_path, tokenizer, [{"prompt": SAYS, "tools": given}])[0].text == "user: hi\nassistant: "


def test_tools_that_a_template_would_leave_out_are_refused_and_texts_stay_as_they_are(tmp_path, tokenizer):
    local = load_local_tokenizer(Path(tokenizer._tokenizer.name_or_path))
    for of in (tokenizer, local):
        with pytest.raises(DataError, match=r"rows\.jsonl:1: .*no place for `tools`.* system message"):
            source(tmp_path, of, [{"prompt": SAYS, "tools": [LOOK_UP]}])[0]
    assert source(tmp_path, tokenizer, [{"prompt": "ab>", "tools": "hammer"}])[0].text == "ab>"


def test_a_token_that_the_model_does_not_know_is_refused_by_its_row(tmp_path, tokenizer):
    """Its groups were made thrice and dropped, without a word."""
    known = source(tmp_path, tokenizer, [{"prompt": "ab>"}], vocabulary=99)
    assert known[0].text == "ab>"
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: .* token id 98, but the model has 98 tokens: a token was added"
    ):
        source(tmp_path, tokenizer, [{"prompt": "ab>"}], vocabulary=98)[0]


@pytest.mark.parametrize("kind", spaced.KINDS)
def test_an_end_that_the_tokenizer_writes_behind_every_text_is_no_part_of_a_prompt(tmp_path, kind):
    """As T5's does: the policy would go on behind the end of its text."""
    ends, plain = (RendererChat(spaced.tokenizer(kind, end), DEFAULT, {}, chosen=True) for end in (True, False))
    spaced.tokenizer(kind, True).save_pretrained(tmp_path)
    local = load_local_tokenizer(tmp_path)
    assert local is not None and ends.encode("ab>") == [*plain.encode("ab>"), 2] == local.encode("ab>")
    for text in ("ab>", "ab</s>", "4 </s>", " "):
        assert render(ends, {"prompt": text}, "row")[1].tolist() == plain.encode(text)
        assert render(local, {"prompt": text}, "row")[1].tolist() == plain.encode(text)


@pytest.mark.parametrize("given", ["hammer", ["hammer"], {"name": "hammer"}])
def test_a_column_of_tools_that_are_none_is_refused_before_anything_starts(tmp_path, given):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": SAYS, "tools": each}) + "\n" for each in ([LOOK_UP], given)))
    rows = dataset(path).parts[0]
    assert isinstance(rows, PromptRows)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: `tools` .*rename the column if it holds something else"):
        rows.check()


def test_messages_without_a_chat_template_are_an_error_with_a_way_out(tmp_path, tokenizer):
    save_byte_tokenizer(tmp_path)
    bare = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    bare.chat_template = None
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*no chat template. Use"):
        source(tmp_path, open_chat(bare, str(tmp_path)), [{"prompt": [{"role": "user", "content": "hi"}]}])[0]


@pytest.mark.parametrize(("how", "kept"), [("truncate_left", "3456789>"), ("truncate_right", "12345678")])
def test_an_over_long_prompt_may_be_cut_and_is_counted_each_time_it_is_drawn(tmp_path, tokenizer, how, kept):
    rows = [{"prompt": "0123456789>"[1:]}, {"prompt": "short"}]
    limited = source(tmp_path, tokenizer, rows, shuffle=False, max_prompt_tokens=8, overlong=how)
    assert (limited[0].text, len(limited[0].token_ids)) == (kept, 8)
    assert limited[1].text == "short" and limited[0].columns == rows[0]
    assert limited.stats() == {"overlong_prompts": 3}


def test_an_over_long_prompt_that_is_to_be_dropped_names_its_row(tmp_path, tokenizer):
    limited = source(tmp_path, tokenizer, [{"prompt": "x" * 9}], max_prompt_tokens=8, overlong="drop")
    with pytest.raises(OverlongError, match=r"rows\.jsonl:1.* 9 tokens"):
        limited[0]


def test_a_chat_template_that_cannot_be_rendered_is_an_error_naming_row_and_reason(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}]
    save_byte_tokenizer(tmp_path)
    broken = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    broken.chat_template = "{% for message in messages %}{{ message['role'] }"
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*chat template cannot be rendered: TemplateSyntaxError"):
        source(tmp_path, open_chat(broken, str(tmp_path)), rows)[0]


def test_an_over_long_prompt_is_an_error_naming_its_row_and_never_cut(tmp_path, tokenizer):
    rows = [{"prompt": "x" * 8}, {"prompt": "x" * 9}]
    limited = source(tmp_path, tokenizer, rows, shuffle=False, max_prompt_tokens=8)
    assert len(limited[0].token_ids) == 8
    with pytest.raises(DataError, match=r"rows\.jsonl:2.* 9 tokens.*data\.max_prompt_tokens"):
        limited[1]


def test_what_a_tokenizer_writes_behind_texts_is_looked_at_once_and_each_text_is_encoded_once(tmp_path, tokenizer):
    encoded = list[str]()

    class Counting:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            encoded.append(text)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        def decode(self, token_ids: list[int]) -> str:
            return tokenizer.decode(token_ids)

    prompts = source(tmp_path, Counting(), [{"prompt": f"{letter}>"} for letter in "abc"])
    assert sorted(prompts[index].text for index in range(3)) == ["a>", "b>", "c>"]
    assert sorted(encoded) == ["a", "a", "a>", "b>", "c>"]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("kind", spaced.KINDS)
def test_a_text_prompt_has_one_bos_and_is_shown_as_the_policy_reads_it(kind, ends):
    tokenizer = spaced.tokenizer(kind, ends)
    chat = RendererChat(tokenizer, DEFAULT, {}, chosen=True)
    for text in ("[INST]ab[/INST]", "<s>[INST]ab[/INST]", "<s><s>[INST]ab[/INST]"):
        shown, ids = render(chat, {"prompt": text}, "row")
        tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
        assert tokens[0] == "<s>" and tokens.count("<s>") == 1 and "</s>" not in tokens
        assert shown == tokenizer.decode(ids) and shown.count("<s>") == 1 and shown.startswith("<s>")


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_eos_token": True}, {"add_bos_token": False}])
def test_a_check_before_the_start_adds_the_bos_that_transformers_adds(tmp_path, flags):
    spaced.tokenizer("today").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | flags))
    theirs = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    own = load_local_tokenizer(tmp_path)
    assert own is not None and own.encode("ab") == theirs.encode("ab")
    chat = RendererChat(theirs, DEFAULT, {}, chosen=True)
    mine, ids = render(own, {"prompt": "<s>ab"}, "row"), render(chat, {"prompt": "<s>ab"}, "row")
    assert mine[0] == ids[0] and mine[1].tolist() == ids[1].tolist() and mine[1].tolist().count(1) == 1


HEADERS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(("how", "first", "last"), [("truncate_left", "", "789"), ("truncate_right", "abc", "0")])
def test_only_the_user_s_text_of_a_conversation_is_cut(tmp_path, how, first, last):
    """Never the BOS, the system message, a header, an earlier answer or the beginning of the assistant's turn."""
    tokenizer = byte_tokenizer_with_markers("<|eos|>", HEADERS)
    chat = RendererChat(tokenizer, DEFAULT, {}, chosen=True)
    tokenizer.bos_token = "<|bos|>"
    whole = "<|bos|>[system]S[/][user]{}[/][assistant]A[/][user]{}[/][assistant]"
    room = len(chat.encode(whole.format(first, last), add_special_tokens=False))
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "abc"},
                {"role": "assistant", "content": "A"},
                {"role": "user", "content": "0123456789"},
            ]
        }
    ]
    cut = source(tmp_path, chat, rows, max_prompt_tokens=room, overlong=how)
    assert cut[0].text == whole.format(first, last) and len(cut[0].token_ids) == room
    assert cut[0].columns == rows[0], "what the reward reads is the row"
    least = len(chat.encode(whole.format("", ""), add_special_tokens=False))
    with pytest.raises(OverlongError, match=r"cuts nothing but the user's text, which is too little"):
        source(tmp_path, chat, rows, max_prompt_tokens=least, overlong=how)[0]


@pytest.mark.parametrize("how", ["truncate_left", "truncate_right"])
def test_a_text_keeps_its_bos_and_one_that_was_rendered_beforehand_is_not_cut(tmp_path, how):
    tokenizer = spaced.tokenizer("today")
    chat = RendererChat(tokenizer, DEFAULT, {}, chosen=True)
    cut = source(tmp_path, chat, [{"prompt": "abcdefgh"}], max_prompt_tokens=5, overlong=how)[0]
    tokens = tokenizer.convert_ids_to_tokens(cut.token_ids.tolist())
    assert len(tokens) == 5 and tokens[0] == "<s>" and tokens.count("<s>") == 1
    rendered = source(tmp_path, chat, [{"prompt": "<s>[INST]a[/INST]b</s>[INST]"}], max_prompt_tokens=5, overlong=how)
    with pytest.raises(OverlongError, match="was rendered beforehand"):
        rendered[0]


@given(
    texts=st.lists(st.text("ab ", max_size=6), min_size=1, max_size=4),
    limit=st.integers(1, 30),
    side=st.sampled_from(["truncate_left", "truncate_right"]),
)
def test_as_much_of_the_user_s_text_stays_as_fits(texts, limit, side):
    messages = [
        {"role": "user" if place % 2 == 0 else "assistant", "content": text} for place, text in enumerate(texts)
    ]

    def count(given):
        return sum(2 + len(each["content"]) for each in given)

    cut = cut_messages(messages, count, limit, side)
    users = sum(len(each["content"]) for each in messages if each["role"] == "user")
    least = count(messages) - users + 1
    if cut is None:
        assert users == 0 or least > limit
        return
    assert count(cut) == min(limit, count(messages))
    assert [each for each in cut if each["role"] != "user"] == [each for each in messages if each["role"] != "user"]
    before, after = ("".join(each["content"] for each in given if each["role"] == "user") for given in (messages, cut))
    assert before.endswith(after) if side == "truncate_left" else before.startswith(after)
