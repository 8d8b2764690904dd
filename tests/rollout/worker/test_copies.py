"""A worker whose tokenizer or rows differ from the learner's is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.chat import hub
from asyncrl.checks.user_code import CODE, workers_code
from asyncrl.config import load_config
from asyncrl.data.local_tokenizer import TOKENIZER, tokenizer_digest
from asyncrl.errors import ConfigError
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.replay.core.live.workers import OTHER_CODE
from asyncrl.rollout.worker.copies import SameCopies
from asyncrl.schema import Config
from asyncrl.telemetry.folder.resumed import ROWS, rows_here
from tests.weights.board import Board, WorkerRendezvous


def machine(at: Path) -> Config:
    """One with a model and rows in `at`, under the names they have everywhere."""
    save_byte_tokenizer(at / "model")
    (at / "rows.jsonl").write_text('{"prompt": "a"}\n')
    return load_config([f"model.path={at}/model", f"data.path={at}/rows.jsonl", "reward.function=r.py:f"])


def same_copies(there: WorkerRendezvous, config: Config) -> SameCopies:
    return SameCopies(there, config, tokenizer_digest(config.model.path))


def announced(config: Config) -> dict[str, str]:
    return {TOKENIZER: tokenizer_digest(config.model.path), ROWS: rows_here(config)}


def exchange_two_tokens(at: Path) -> None:
    file = at / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    one, two = (name for name, id_ in ids.items() if id_ in b"17")
    ids[one], ids[two] = ids[two], ids[one]
    file.write_text(json.dumps(content))


def other_template(at: Path) -> None:
    (at / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")


def other_rows(at: Path) -> None:
    (at / "rows.jsonl").write_text('{"prompt": "b"}\n')


def sentencepiece(at: Path, content: str = "x") -> None:
    shutil.rmtree(at / "model")
    (at / "model").mkdir()
    (at / "model" / "tokenizer.model").write_text(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (exchange_two_tokens, r"model\.path=.*other/model has another tokenizer or chat template here"),
        (other_template, r"model\.path=.*other/model has another tokenizer or chat template here"),
        (other_rows, r"data\.path=.*other/rows\.jsonl has other rows here"),
        (sentencepiece, r"model\.path=.*other/model has another tokenizer"),
    ],
)
def test_a_worker_with_other_copies_than_the_learner_s_takes_no_weights(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    learners, copied, other = (machine(tmp_path / name) for name in ("learner", "copied", "other"))
    change(tmp_path / "other")
    board = Board()
    board.announce(announced(learners))
    there = WorkerRendezvous(board, "w")
    assert same_copies(there, copied).watch(-1, 0.0).values == announced(learners)
    with pytest.raises(ConfigError, match=said):
        same_copies(there, other).watch(-1, 0.0)
    board.announce({TOKENIZER: "", ROWS: ""})  # of a learner that has none
    same_copies(there, other).watch(-1, 0.0)


def test_a_worker_with_another_file_of_the_user_s_goes_on_and_tells_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rewards in one run, and nobody knew."""
    configs = [machine(tmp_path / name) for name in ("learner", "copied", "other")]
    for config, text in zip(configs, ("a = 1", "a = 1", "a = 2"), strict=True):
        file = Path(config.data.path).with_name("r.py")
        file.write_text(text)
        config.reward.function = f"{file}:f"
    learners, copied, other = configs
    board = Board()
    there = [same_copies(WorkerRendezvous(board, "w"), config) for config in (copied, other)]
    board.announce({CODE: workers_code(learners)})
    for copies in there:
        copies.watch(-1, 0.0)
        copies.watch(-1, 0.0)
    assert [copies.stats() for copies in there] == [{OTHER_CODE: 0.0}, {OTHER_CODE: 1.0}]
    (line,) = caplog.messages
    assert f"reward.function={other.reward.function}, or a file that it imports, is different here" in line
    assert all(known["reward.function"] in line for known in map(workers_code, (learners, other)))
    board.announce({CODE: workers_code(other)})  # a resume by the changed file
    for copies in there:
        copies.watch(-1, 0.0)
    assert [copies.stats() for copies in there] == [{OTHER_CODE: 1.0}, {OTHER_CODE: 0.0}]


def test_code_that_the_learner_s_machine_does_not_have_is_not_compared(tmp_path: Path) -> None:
    config = machine(tmp_path)
    assert workers_code(config) == {}
    config.reward.function = "math:sqrt"
    config.loss.function = f"{write_module(tmp_path)}:f"  # runs in the learner alone
    assert workers_code(config) == {}


def write_module(at: Path) -> Path:
    (at / "own.py").write_text("")
    return at / "own.py"


def test_what_cannot_be_told_is_empty(tmp_path: Path) -> None:
    config = machine(tmp_path)
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    (tmp_path / "rows.jsonl").unlink()
    assert announced(config) == {TOKENIZER: "", ROWS: ""} and tokenizer_digest(str(tmp_path)) == ""


def test_a_tokenizer_of_the_hub_and_one_of_sentencepiece_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = machine(tmp_path / "cache")
    cached = {"org/model": Path(config.model.path)}
    monkeypatch.setattr("asyncrl.data.local_tokenizer.described_in", cached.get)
    assert tokenizer_digest("org/model") != "" == tokenizer_digest("org/unreachable")
    monkeypatch.setattr("asyncrl.data.local_tokenizer.described_in", hub.described_in)
    sentencepiece(tmp_path / "cache", "one")
    one = tokenizer_digest(config.model.path)
    sentencepiece(tmp_path / "cache", "two")
    assert "" != one != tokenizer_digest(config.model.path)
