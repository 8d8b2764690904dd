"""Where the probe tokens of a run's canary are from."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.checks.servers import PROBE_TOKENS
from asyncrl.config import load_config
from asyncrl.data.local_tokenizer import own_tokenizer
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.publishing import probes
from asyncrl.learner.publishing.probes import PROBES, agreed_probes, probes_of, probes_of_run
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.schema import Config
from tests.learner.feed import tiny_model

CPU = torch.device("cpu")
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
TEXTS = [f"question {i}: how much is {7 * i} and {i * i}?" for i in range(100)]


def policy(**changes: Any) -> PolicyModel:
    return PolicyModel(tiny_model("llama", **changes))


def run(folder: Path, prompts: list[Any], *overrides: str) -> Config:
    save_byte_tokenizer(folder / "model", template=TEMPLATE)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return load_config([f"model.path={folder / 'model'}", f"data.path={rows}", "reward.function=r.py:f", *overrides])


def texts(found: probes.Probes) -> list[str]:
    return [bytes(ids.tolist()).decode() for ids in found]


@pytest.mark.parametrize("chat", [False, True])
def test_they_are_pieces_of_the_runs_prompts_as_its_template_writes_them(chat: bool, tmp_path: Path) -> None:
    given = [[{"role": "user", "content": text}] for text in TEXTS] if chat else TEXTS
    found, why_random = probes_of_run(run(tmp_path, given), policy())
    whole = [f"<{text}>" for text in TEXTS] if chat else TEXTS
    assert not why_random and len(found) == PROBES and {len(ids) for ids in found} == {PROBE_TOKENS}
    assert all(any(piece in text for text in whole) for piece in texts(found))
    assert any(">" in piece for piece in texts(found)) == chat
    assert len({piece[:6] for piece in texts(found)}) > PROBES / 2, "what all prompts begin with is one of the pieces"


def test_they_are_the_same_for_a_seed_and_others_for_another(tmp_path: Path) -> None:
    first, again, other = (probes_of_run(run(tmp_path, TEXTS, f"seed={seed}"), policy())[0] for seed in (1, 1, 2))
    assert texts(first) == texts(again) != texts(other)


def test_a_tokenizer_that_was_read_already_is_not_read_again(tmp_path: Path) -> None:
    config = run(tmp_path, TEXTS)
    expected, own = probes_of_run(config, policy())[0], own_tokenizer(config.model.path)
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    assert texts(probes_of_run(config, policy(), own)[0]) == texts(expected)


def test_where_prompts_are_few_or_short_there_are_random_tokens_too(tmp_path: Path) -> None:
    found, why_random = probes_of_run(run(tmp_path, ["x", "1 + 1?", "2 + 2?", "1 + 1?"]), policy())
    assert not why_random and sorted(texts(found[:1])[0]) == sorted("x1 + 1?2 + 2?1 + 1?"), "one of them all"
    assert PROBES * PROBE_TOKENS <= sum(map(len, found)) < (PROBES + 1) * PROBE_TOKENS


def test_short_prompts_are_joined_for_each_probe_costs_an_engine_a_forward(tmp_path: Path) -> None:
    found, _ = probes_of_run(run(tmp_path, [f"{i} + {i}?" for i in range(10, 99)]), policy())
    assert len(found) == PROBES and {len(ids) for ids in found} == {PROBE_TOKENS}
    assert all(piece.count("?") >= 2 and set(piece) <= set("0123456789 +?") for piece in texts(found))


def test_a_model_with_few_positions_is_given_pieces_that_fit(tmp_path: Path) -> None:
    found, _ = probes_of_run(run(tmp_path, TEXTS), policy(max_position_embeddings=8))
    assert max(map(len, found)) == 8 and sum(map(len, found)) == PROBES * PROBE_TOKENS


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["data.path=gone.jsonl"], "there is no such file"),
        (["data.path=hf:somebody/rows:train"], "only prompts in files"),
        (["data.path=my.py:Rows"], "no file my.py"),
        (["data.prompt_column=question"], "no column `question`"),
        (["model.path=."], "has no tokenizer.json"),
    ],
)
def test_without_prompts_they_are_random_and_it_is_said_why(overrides: list[str], why: str, tmp_path: Path) -> None:
    config, model = run(tmp_path, TEXTS, *overrides), policy()
    found, why_random = probes_of_run(config, model)
    assert why in why_random
    assert all(map(np.array_equal, found, probes_of(model, config.seed)))


def test_prompts_of_another_models_tokenizer_are_none(tmp_path: Path) -> None:
    model = policy(vocab_size=64)
    found, why_random = probes_of_run(run(tmp_path, TEXTS), model)
    assert "outside the model's vocabulary of 64" in why_random and max(int(ids.max()) for ids in found) < 64


def test_code_of_the_users_is_not_run_for_them(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("raise SystemExit('run in the learner')\n")
    config = run(tmp_path, TEXTS, f"data.path={tmp_path / 'my.py'}:Rows")
    assert "only prompts in files" in probes_of_run(config, policy())[1]


def test_every_rank_has_those_of_rank_0_and_it_says_where_they_are_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    monkeypatch.setattr(probes, "text_of_rank_zero", lambda mine, device: said.append(mine) or said[0])
    config = run(tmp_path, TEXTS)
    with caplog.at_level(logging.INFO):
        first = agreed_probes(config, policy(), CPU)
    assert caplog.messages == ["canary: tokens of this run's prompts"]
    monkeypatch.setattr(probes, "is_first", lambda: False)
    Path(config.data.path).unlink()
    other = agreed_probes(config, policy(), CPU)
    assert texts(first) == texts(other) and said[1] == "" and other[0].dtype == np.int32
