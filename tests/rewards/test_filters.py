from __future__ import annotations

import asyncio
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import ConfigError, FilterError
from asyncrl.rewards.filter_pool import FilterPool
from asyncrl.rewards.filters import FinishedGroup, Verdict, make_filter, to_verdict

FILE = str(Path(__file__).with_name("filter_functions.py"))

pytestmark = pytest.mark.timeout(400)


def group(do: str, rewards: list[float] | None = None) -> FinishedGroup:
    rewards = [0.0, 1.0] if rewards is None else rewards
    return FinishedGroup(
        completions=["a", "b\ud800"],
        rewards=rewards,
        parts=[{"style": 0.5}, {}],
        finish_reasons=["stop", "length"],
        lengths=[3, 8],
        row={"prompt": "p", "do": do},
    )


def judged(*groups: FinishedGroup, name: str = "keep", timeout_s: float = 60.0) -> list:
    async def scenario() -> list:
        async with FilterPool(f"{FILE}:{name}", timeout_s=timeout_s) as pool:
            return await asyncio.gather(*map(pool.judge, groups), return_exceptions=True)

    return asyncio.run(scenario())


def test_a_filter_keeps_drops_and_gives_its_reason() -> None:
    verdicts = judged(group("keep"), group("drop"), group("keep", [0.9, 0.8]))
    assert verdicts == [Verdict(True), Verdict(False), Verdict(False, "too easy")]


def test_a_filter_sees_the_whole_group() -> None:
    ((verdict,)) = judged(group("see"))
    assert verdict.why == repr((["a", "b\ud800"], [0.0, 1.0], [{"style": 0.5}, {}], ["stop", "length"], [3, 8]))


def test_a_filter_that_raises_or_answers_nonsense_says_nothing_about_other_groups() -> None:
    bad = ["raise", "none", "number", "empty", "list", "exit"]
    answers = judged(*map(group, bad), group("keep"))
    assert answers.pop() == Verdict(True)
    for what, says in zip(bad, ("KeyError", "None", "1", "''", "True", "exit code 3"), strict=True):
        error = answers.pop(0)
        assert isinstance(error, FilterError)
        assert says in str(error), what
        assert f"{FILE}:keep" in str(error)


def test_a_filter_that_hangs_is_killed_at_its_deadline() -> None:
    (error,) = judged(group("hang"), timeout_s=1.0)
    assert isinstance(error, FilterError) and "timeout_s=1" in str(error)


def test_an_async_filter_is_awaited() -> None:
    assert make_filter(f"{FILE}:slowly")(group("keep")) == Verdict(True)


def test_a_numpy_truth_is_a_truth_and_a_number_is_none() -> None:
    assert to_verdict(np.float32(1.0) > 0, "f") == Verdict(True)
    with pytest.raises(FilterError, match="Return True to keep"):
        to_verdict(np.float32(1.0), "f")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("/nowhere/f.py:keep", "rollout.filters='/nowhere/f.py:keep': there is no file"),
        (f"{FILE}:nothing", "has no 'nothing'. It defines: keep"),
        (f"{FILE}:two_arguments", r"cannot be called as f\(group\)"),
    ],
)
def test_a_filter_that_cannot_be_called_is_refused_at_the_start(spec: str, says: str) -> None:
    async def scenario() -> None:
        async with FilterPool(spec, timeout_s=60):
            pass

    with pytest.raises(ConfigError, match=says):
        asyncio.run(scenario())


def test_the_example_of_the_page_about_groups_does_what_it_says(tmp_path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "groups.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "my_filters.py").write_text(example)
    keep = make_filter(f"{tmp_path}/my_filters.py:keep")
    assert keep(group("", [0.0, 0.0])) == Verdict(False, "nobody solved it")
    assert keep(replace(group(""), lengths=[1, 1])) == Verdict(False, "empty answers")
    assert keep(group("")) == Verdict(True)
    assert keep(replace(group("", [1.0, 1.0]), row={"prompt": "p", "level": 4})) == Verdict(False)
    shown = {
        name for row in re.findall(r"^\| (`.*`) \|", page, flags=re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert {field.name for field in fields(FinishedGroup)} <= shown
