from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import load_config
from asyncrl.evaluator import identity as module
from asyncrl.evaluator.identity import differences, digest, identity


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/model.safetensors").write_bytes(b"weights")
    Path("d.jsonl").write_text('{"prompt": "a"}\n')
    Path("r.py").write_text("def score(completion, row): return 1.0\n")
    return ["model.path=model", "data.path=d.jsonl", "reward.function=r.py:score"]


def made_of(overrides: list[str], rows: int = 1):
    return identity(load_config(overrides), rows)


def test_settings_that_samples_depend_on_are_told_by_name(given: list[str]) -> None:
    before = made_of(given)
    after = made_of([*given, "eval.samples=2", "eval.temperature=1", "seed=4", "rollout.max_new_tokens=9"], rows=2)
    assert differences(before, after) == [
        "eval.rows: 1 -> 2",
        "eval.samples: 1 -> 2",
        "eval.temperature: 0.0 -> 1.0",
        "rollout.max_new_tokens: 256 -> 9",
        "seed: 0 -> 4",
    ]


@pytest.mark.parametrize(
    "change", ["eval.answer=boxed", "eval.pass_score=0.5", "reward.workers=3", "engine.threads=2", "learner.lr=1"]
)
def test_settings_that_no_sample_depends_on_may_change(given: list[str], change: str) -> None:
    assert made_of([*given, change]) == made_of(given)


@pytest.mark.parametrize(("key", "file"), [("model.path", "model/model.safetensors"), ("data.path", "d.jsonl"),
                                           ("reward.function", "r.py")])  # fmt: skip
def test_other_content_under_the_same_path_is_another_evaluation(given: list[str], key: str, file: str) -> None:
    before = made_of(given)
    Path(file).write_text(Path(file).read_text() + "\n")
    (found,) = differences(before, made_of(given))
    assert found.startswith(f"{key} (what its files hold): ")
    assert digest(before) != digest(made_of(given))


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("reward.functions.style={function: 'r.py:score'}", "reward.functions"),
        ("reward.functions.style='r.py:score'", "reward.functions"),
        ("environment.args.functions=['r.py:score']", "environment.args"),
    ],
)
def test_code_named_by_several_rewards_or_by_arguments_counts_too(given: list[str], setting: str, key: str) -> None:
    rest = [one for one in given if not (one.startswith("reward.") and setting.startswith("reward."))]
    before = made_of([*rest, setting])
    Path("r.py").write_text("def score(completion, row): return 0.0\n")
    found = [one.partition(" (what its files hold)")[0] for one in differences(before, made_of([*rest, setting]))]
    assert key in found


def test_of_large_files_both_ends_and_the_length_count(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 8)
    monkeypatch.setattr(module, "END_BYTES", 4)
    weights = Path("model/model.safetensors")
    seen = set()
    for content in (b"abcd....efgh", b"abcX....efgh", b"abcd....eXgh", b"abcd.....efgh"):
        weights.write_bytes(content)
        seen.add(digest(made_of(given)))
    assert len(seen) == 4
