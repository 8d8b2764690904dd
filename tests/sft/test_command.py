"""`asyncrl sft` up to its start: what it shows and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli.main import main
from asyncrl.cli.processes.ending import Ended
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.telemetry.folder.run_folder import prepare_run_folder
from asyncrl.telemetry.trace import read_trace
from tests.chat import spaced
from tests.sft.given import settings, texts, train_alone, write

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def given(folder: Path, *more: str) -> list[str]:
    """Arguments, with what they name."""
    settings(folder)
    own = [f"model.path={folder / 'model'}", f"data.path={folder / 'rows.jsonl'}", f"run.dir={folder / 'run'}"]
    return ["sft", *own, "data.max_tokens=64", "learner.rows_per_step=6", *more]


def test_a_dry_run_shows_a_row_with_its_loss_the_lengths_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "held.jsonl", [{"messages": TALK}])
    arguments = given(tmp_path, "--dry-run", f"eval.path={tmp_path / 'held.jsonl'}")
    write(tmp_path / "rows.jsonl", [{"messages": TALK}, {"messages": [*TALK, *TALK]}])
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "user: hi\nassistant: ▶hello<|eos|>◀" in said and "rows.jsonl:1" in said
    assert "2 rows, all of a form that can be used" in said and "tokens of 3 rows (data.max_tokens=64)" in said
    assert "1 steps of 6 rows" in said and "-m asyncrl.sft" in said and not (tmp_path / "run").exists()
    assert "Adam moments" in said and "checkpoints are written from" in said, "the memory of a rank"
    assert not any(what in said for what in ("replay", "rollout", "copies of its weights"))


def test_a_dry_run_shows_the_space_that_a_completion_begins_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = given(tmp_path, "--dry-run")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gpt2", "vocab_size": 400}))
    spaced.tokenizer("legacy").save_pretrained(tmp_path / "model")
    write(tmp_path / "rows.jsonl", [{"prompt": "ab>", "completion": " 4"}])
    assert main(arguments) == 0 and "ab>▶ 4</s>◀" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_leaves_a_trace_where_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, *own = given(tmp_path, "learner.steps=2", "telemetry.trace=true")
    subprocess.run([sys.executable, "-m", "asyncrl.sft", *own], check=True, capture_output=True, timeout=100)
    assert main(["trace", str(tmp_path / "run")]) == 0
    assert "100.0% of them accounted for" in capsys.readouterr().out
    (rank,) = read_trace(tmp_path / "run")
    names = {span.name for span in rank.spans}
    assert rank.role == "learner 0" and {"wait for a batch", "forward", "backward", "checkpoint"} <= names


COUNTING = """
import sys
from asyncrl.sft.__main__ import main
from asyncrl.storage import sealed
real, sealed.SETTLED_NS = sealed._digest, 0
def digest(path):
    if path.name == "state.json" and path.parent.suffix != ".tmp":  # what is being saved is hashed, too
        print("read", path.parent.name)
    return real(path)
sealed._digest = digest
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_resume_without_its_command_reads_its_checkpoint_once_where_it_changes_settings(tmp_path: Path) -> None:
    _, *own = given(tmp_path, "resume=auto")
    for more in ("learner.steps=1", "learner.steps=2"):
        ended = subprocess.run(
            [sys.executable, "-c", COUNTING, *own, more], check=True, capture_output=True, text=True, timeout=100
        )
    assert [line for line in ended.stdout.splitlines() if line.startswith("read")] == ["read step_1"]
    assert "# resumed from step_1: learner.steps: 1 -> 2" in (tmp_path / "run" / "config.yaml").read_text()


def test_rows_that_are_too_long_are_told_with_the_rule_and_refused_where_all_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = given(tmp_path, "--dry-run")
    write(tmp_path / "rows.jsonl", [*texts(4), {"prompt": "p" * 70, "completion": "c"}])
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "1 of 5 rows looked at have more than data.max_tokens=64 (the longest:" in said
    assert "rows.jsonl:5, 72): data.overlong=drop" in said
    write(tmp_path / "rows.jsonl", [{"prompt": "p" * 70, "completion": "c"}])
    assert main(arguments) == 2
    assert "all 1 rows that were looked at have more than" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["data.path=nowhere.jsonl"], "data.path=nowhere.jsonl: there is no such file"),
        (["data.completion_column=answer"], "rows.jsonl:1 has no column `answer` (columns: completion, prompt)"),
        (["data.max_tokens=300"], "is more than the 256 positions of the model of model.path"),
        (["learner.device=cuda:99"], "learner.device=cuda:99 needs"),
        (["learner.keep_best=loss/totl"], "is not a metric. Did you mean `loss/total`?"),
        (["resume=ckpt/none"], "there is no such checkpoint"),
        (["model.renderer=qwen3", "data.chat=true"], "model.renderer=qwen3 cannot be used with this tokenizer"),
    ],
)
def test_what_cannot_work_is_refused_before_a_start(
    tmp_path: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given(tmp_path, *more)) == 2
    assert said in capsys.readouterr().err


def test_messages_without_a_chat_template_are_refused_with_the_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = given(tmp_path)
    write(tmp_path / "rows.jsonl", [{"messages": TALK}])
    save_byte_tokenizer(tmp_path / "model", template="")
    assert main(arguments) == 2
    assert "rows.jsonl:1: the tokenizer has no chat template" in capsys.readouterr().err


def test_an_order_by_a_column_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given(tmp_path, "data.order_by=level", "--dry-run")) == 2
    assert "rows.jsonl:1: data.order_by=level needs a number in every row" in capsys.readouterr().err


def test_a_run_that_has_ended_says_so_and_is_longer_with_more_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = given(tmp_path, "resume=auto")
    ours = settings(tmp_path)
    prepare_run_folder(ours, "a")
    train_alone(ours)
    assert main(arguments) == 0
    for more, longer in ((), "learner.epochs=2"), (("learner.steps=4",), "learner.steps=8"):
        assert main([*arguments, *more]) == 0
        said = capsys.readouterr().out
        assert "nothing to do: 4 steps are trained" in said and f" {longer} resume=auto" in said
        assert "learner.steps=4 " not in said
    assert main([*arguments, "learner.epochs=2", "learner.rows_per_step=20", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "5 steps of 20 rows (40 rows, 2 epochs)" in said and "learner.rows_per_step: 6 -> 20" in said


def test_a_folder_of_the_other_kind_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = given(tmp_path)
    prepare_run_folder(settings(tmp_path), "a")
    others = [*arguments[1:4], "reward=exact_match", "resume=auto", "rollout.max_new_tokens=8"]
    assert main(["local", *others, "data.max_prompt_tokens=64", "--dry-run"]) == 2
    assert "holds a run of asyncrl sft" in capsys.readouterr().err


def test_watch_knows_how_many_steps_its_epochs_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It showed `step 3/0`, and no run of epochs was unfinished."""
    monkeypatch.setattr("asyncrl.cli.sft.supervise", lambda *_, **__: Ended(code=1))
    assert main(given(tmp_path, "learner.epochs=10")) == 1
    rows = sum(1 for _ in (tmp_path / "rows.jsonl").open())
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3, "time": 1.0, "loss/total": 0.5}\n')
    (tmp_path / "run" / "logs" / "ends.json").write_text("{}")
    capsys.readouterr()
    assert main(["watch", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert f"Its last step was 3 of {-(-10 * rows // 6)}, at" in said and "not finished" in said
    (tmp_path / "run" / "run.json").unlink()
    assert main(["watch", str(tmp_path / "run")]) == 0
    assert "Its last step was 3, at" in capsys.readouterr().out
