"""Tests of `eval.sets`: the settings of each set, what it takes over from the run, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.checks.evaluations import eval_sets
from asyncrl.cli.eval import chosen_set
from asyncrl.config import config_from_dict, config_to_dict, load_config
from asyncrl.digests import run_digest
from asyncrl.errors import ConfigError

GIVEN = ["model.path=m", "data.path=d.jsonl", "reward=exact_match", "data.where.level=3", "data.prompt_column=ask"]


def test_a_path_alone_is_one_set_with_the_settings_of_eval_and_of_the_run() -> None:
    (found,) = eval_sets(load_config([*GIVEN, "eval.path=e.jsonl", "eval.name=h", "eval.rows=9"]))
    assert (found.name, found.key, found.source.key) == ("h", "eval", "eval.path")
    assert (found.source.specs, found.source.where, found.source.prompt_column) == (("e.jsonl",), (), "ask")
    assert found.config.eval.rows == 9
    assert found.config.reward.metric == "accuracy"
    assert found.config.rollout.max_new_tokens == 256
    assert eval_sets(load_config(GIVEN)) == ()


def test_a_set_takes_what_it_does_not_say_from_eval_and_the_run() -> None:
    config = load_config(
        [
            *(*GIVEN, "eval.path=e.jsonl", "eval.every=10", "eval.rows=50", "environment.timeout_s=7"),
            *("reward.workers=2", "eval.sets.plain=p.jsonl", "eval.sets.hard.path=[a.jsonl,b.parquet]"),
            *("eval.sets.hard.every=50", "eval.sets.hard.samples=4", "eval.sets.hard.temperature=1"),
            *("eval.sets.hard.max_new_tokens=900", "eval.sets.hard.reward=gsm8k", "eval.sets.hard.where.level=5"),
            *("eval.sets.hard.environment.max_tokens=64", "eval.sets.hard.prompt_column=q"),
        ]
    )
    first, plain, hard = eval_sets(config)
    assert [each.name for each in (first, plain, hard)] == ["heldout", "plain", "hard"]
    assert plain.config.eval.every == 10 and plain.source.specs == ("p.jsonl",)
    assert plain.config.reward == config.reward and plain.config.environment == config.environment
    own = hard.config
    assert (own.eval.every, own.eval.rows, own.eval.samples, own.eval.temperature) == (50, 50, 4, 1.0)
    assert own.rollout.max_new_tokens == 900
    assert (own.reward.function, own.reward.metric, own.reward.workers) == ("gsm8k", "reward", 2)
    assert (own.environment.max_tokens, own.environment.timeout_s) == (64, 7.0)
    assert hard.source.specs == ("a.jsonl", "b.parquet") and hard.source.prompt_column == "q"
    assert len(hard.source.where) == 1 and hard.source.key == "eval.sets.hard.path"
    again = config_from_dict(config_to_dict(config))
    assert eval_sets(again) == (first, plain, hard)


def test_another_environment_begins_with_its_own_defaults() -> None:
    settings = ["environment.name=tools", "environment.args.max_turns=3", "eval.sets.a.path=a"]
    (same,) = eval_sets(load_config([*GIVEN, *settings, "eval.sets.a.environment.timeout_s=5"]))
    assert same.config.environment.args == {"max_turns": 3}
    (other,) = eval_sets(load_config([*GIVEN, *settings, "eval.sets.a.environment=single_turn"]))
    assert (other.config.environment.name, other.config.environment.args) == ("single_turn", {})


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["eval.sets.a.every=2"], ["eval.sets.a has no path", "eval.sets.a.path=FILE"]),
        (["eval.sets.a.path=x", "eval.sets.a.evry=2"], ["eval.sets.a.evry", "Did you mean `every`?"]),
        (["eval.sets.a.path=x", "eval.sets.a.every=often"], ["eval.sets.a.every must be a whole number", "'often'"]),
        (["eval.sets.a.path=x", "eval.sets.a.samples=true"], ["eval.sets.a.samples must be a whole number"]),
        (["eval.sets.a.path=x", "eval.sets.a.samples=4"], ["eval.sets.a: eval.samples=4 at eval.temperature=0"]),
        (["eval.sets.a.path=x", "eval.sets.a.rows=0"], ["eval.sets.a: eval.rows must be at least 1"]),
        (["eval.sets.a.path=x", "eval.sets.a.answer=box"], ["eval.sets.a: eval.answer must be one of", "`boxed`"]),
        (["eval.sets.a.path=x", "eval.sets.a.reward=gsm"], ["eval.sets.a: reward.function must be", "`gsm8k`"]),
        (["eval.sets.a.path=x", "eval.sets.a.reward.fn=f"], ["eval.sets.a.reward.fn: there is no such setting"]),
        (["eval.sets.a.path=x", "eval.sets.a.reward.workers=4"], ["Set reward.workers"]),
        (["eval.sets.a.path=x", "eval.sets.a.environment=tool"], ["eval.sets.a: environment.name", "`tools`"]),
        (["eval.sets.a.path=x", "eval.sets.a.where=3"], ["eval.sets.a.where must be a mapping"]),
        (["eval.sets={a b:x}"], ["eval.name is part of the names of metrics", "'a b'"]),
        (["eval.path=y", "eval.sets.heldout=x"], ["both called heldout", "eval.name=NAME"]),
    ],
)
def test_what_is_no_set_is_refused_with_its_key_and_the_way_out(given: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([*GIVEN, *given])
    for part in parts:
        assert part in str(refused.value)


def test_asyncrl_eval_takes_the_set_that_is_named_or_the_only_one() -> None:
    sets = ["eval.sets.a.path=a", "eval.sets.b.path=b", "eval.sets.b.reward=f1"]
    assert chosen_set(load_config(GIVEN)) is None
    (only,) = eval_sets(load_config([*GIVEN, *sets[:1]]))
    assert chosen_set(load_config([*GIVEN, *sets[:1]])) == only
    named = chosen_set(load_config([*GIVEN, *sets, "eval.name=b"]))
    assert named is not None and (named.config.data.path, named.config.reward.function) == ("b", "f1")
    first = chosen_set(load_config([*GIVEN, *sets, "eval.path=e"]))
    assert first is not None and first.config.data.path == "e"
    with pytest.raises(ConfigError, match=r"several evaluation sets \(a, b\).*Choose it with eval\.name"):
        chosen_set(load_config([*GIVEN, *sets]))


def test_processes_with_other_sets_do_not_meet_and_the_place_of_a_file_is_no_difference(tmp_path: Path) -> None:
    def digest(*settings: str) -> str:
        return run_digest(load_config([*GIVEN, *settings]))

    here = digest("eval.sets.a.path=/x/a.jsonl", "eval.sets.a.every=5")
    assert here == digest("eval.sets.a.path=/y/a.jsonl", "eval.sets.a.chunk=7")
    assert here != digest("eval.sets.b.path=/x/a.jsonl")
    assert here != digest("eval.sets.a.path=/x/a.jsonl", "eval.sets.a.reward=f1")
    assert here != digest("eval.sets.a.path=/x/a.jsonl", "eval.sets.a.samples=2", "eval.sets.a.temperature=1")
