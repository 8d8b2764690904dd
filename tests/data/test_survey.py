from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from asyncrl.checks.sources import Source
from asyncrl.data.local_tokenizer import load_local_tokenizer
from asyncrl.data.rows.opening import open_source
from asyncrl.data.rows.view import PromptRows
from asyncrl.data.survey import LONGEST, SAMPLED, chosen, survey
from asyncrl.errors import DataError
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "häagen <b> 3 {}"}]
TEMPLATES = [
    "{% for m in messages %}{{ m['role'] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}",
    "{{ bos_token }}{% for m in messages %}\n {%- if m.role == 'user' %}\n{{ m.content|trim }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m|tojson }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
]


def opened(path: Path) -> PromptRows:
    return open_source(Source(key="data.path", specs=(str(path),)))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_rendered_and_counted_as_transformers_does(tmp_path: Path, template: str) -> None:
    save_byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False), load_local_tokenizer(tmp_path)
    assert ours is not None
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(MESSAGES, add_generation_prompt=True) == text
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode("plain text") == theirs.encode("plain text")


def test_a_folder_without_a_tokenizer_of_one_file_has_none(tmp_path: Path) -> None:
    assert load_local_tokenizer(tmp_path / "org" / "name") is None


def test_the_first_random_and_longest_rows_are_looked_at_the_same_ones_each_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * (1 + n % 977)}) + "\n" for n in range(5000)))
    rows = chosen(opened(path).sizes())
    assert rows == chosen(opened(path).sizes())
    assert set(range(4)) <= set(rows) and SAMPLED < len(rows) <= SAMPLED + LONGEST + 4
    by_length = sorted((n % 977 for n in range(5000)), reverse=True)[:LONGEST]
    assert sorted((n % 977 for n in rows), reverse=True)[: LONGEST // 2] == by_length[: LONGEST // 2]


def test_every_row_is_checked_whether_it_is_looked_at_or_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' * 3000 + "{}\n" + '{"prompt": "a"}\n' * 3000)
    with pytest.raises(DataError, match=r"rows\.jsonl:3001 has no column `prompt`"):
        survey(opened(path), None, limit=10)
