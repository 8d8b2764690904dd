"""Tests of `model.renderer`: which renderer a model folder gets, and what the default one can do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.chat.base import ChatError
from asyncrl.chat.choice import agrees, open_chat, told
from asyncrl.errors import ConfigError
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from tests.chat.markers import tokenizer

QWEN3 = (Path(__file__).parent / "qwen3.jinja").read_text()
"""Written after what the renderer of the family gives, in another way."""
USER = [{"role": "user", "content": "hi"}]


def folder(path: Path, model_type: str) -> str:
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(path)


def test_a_folder_gets_its_family_s_renderer_when_that_writes_what_its_template_writes(tmp_path: Path) -> None:
    chat = open_chat(tokenizer("<|im_end|>", QWEN3), folder(tmp_path, "qwen3"))
    assert chat.name == "qwen3" and not chat.why_single
    assert told(chat, "auto") == "chat: renderer qwen3"


@pytest.mark.parametrize("change", [("<|im_start|>user", "<|im_start|>human"), ("# Tools", "# tools")])
def test_another_template_is_not_taken_for_the_family_s(tmp_path: Path, change: tuple[str, str]) -> None:
    assert open_chat(tokenizer("<|im_end|>", QWEN3.replace(*change)), folder(tmp_path, "qwen3")).name == "default"


def test_the_family_is_asked_for_in_config_json_alone(tmp_path: Path) -> None:
    assert open_chat(tokenizer("<|im_end|>", QWEN3), folder(tmp_path, "llama")).name == "default"
    assert open_chat(tokenizer("<|im_end|>", QWEN3), str(tmp_path / "nothing")).name == "default"
    assert agrees(tokenizer("<|im_end|>", QWEN3), "qwen3", {})


def test_a_model_that_the_library_knows_by_name_needs_no_proof() -> None:
    assert open_chat(tokenizer("<|im_end|>"), "Qwen/Qwen3-0.6B").name == "qwen3"


def test_a_renderer_whose_markers_the_tokenizer_lacks_is_refused_by_name(tmp_path: Path) -> None:
    bare = tokenizer().from_pretrained(_saved_bytes(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.renderer=qwen3 cannot be used with this tokenizer"):
        open_chat(bare, str(tmp_path), "qwen3")


def test_an_unknown_template_is_followed_only_where_the_user_says_so(tmp_path: Path) -> None:
    found = open_chat(tokenizer("<|im_end|>", QWEN3), str(tmp_path))
    assert "model.renderer=default" in found.why_single and "default" in told(found, "auto")
    with pytest.raises(ChatError, match=r"model\.renderer=default"):
        found.extend(found.render(USER), [104], USER)
    named = open_chat(tokenizer("<|im_end|>", QWEN3), str(tmp_path), "default")
    assert not named.why_single
    prompt, end = named.render(USER), named.stop_token_ids[0]
    follows = named.decode(named.extend(prompt, [104, end], USER))
    assert follows == "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    cut = named.decode(named.extend(prompt, [104], USER))
    assert cut == "<|im_end|>" + follows


def test_the_default_renderer_reads_calls_where_it_is_told_how(tmp_path: Path) -> None:
    chat = open_chat(tokenizer("<|im_end|>", QWEN3), str(tmp_path), "default", {"tool_parser": "qwen3"})
    turn = chat.encode('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', add_special_tokens=False)
    (call,) = chat.parse(turn, prompt=chat.render(USER), finish_reason="stop").tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 1})
    assert "hi" in chat.decode(chat.extend(chat.render(USER), turn, USER))


def test_a_template_that_changes_what_was_said_cannot_be_followed(tmp_path: Path) -> None:
    shouting = "{% for m in messages %}{{ m.content | upper }}\n{% endfor %}"
    chat = open_chat(tokenizer("<|im_end|>", shouting), str(tmp_path), "default")
    with pytest.raises(ChatError, match="changes what the assistant said"):
        chat.extend(chat.render(USER), [104], USER)


def test_without_a_template_messages_are_refused_with_a_way_out(tmp_path: Path) -> None:
    chat = open_chat(tokenizer("<|im_end|>"), str(tmp_path))
    with pytest.raises(ChatError, match="Use an instruction-tuned model"):
        chat.render(USER)


def _saved_bytes(folder: Path) -> Path:
    save_byte_tokenizer(folder)
    return folder
