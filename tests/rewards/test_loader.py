from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.checks.rewards import RewardTerm
from asyncrl.errors import ConfigError, RewardError, UserCodeError
from asyncrl.rewards.call import Call
from asyncrl.rewards.exact_match import exact_match
from asyncrl.rewards.forms import adapt_reward
from asyncrl.rewards.loader import make_reward, settle
from asyncrl.rewards.score import RewardScore
from asyncrl.user_code import called, load_function

FILE = str(Path(__file__).with_name("reward_functions.py"))


def scores(name: str, completions: list[str], row: dict) -> list[RewardScore]:
    """Raises the first failure."""
    outcomes = settle(adapt_reward(load_function(f"{FILE}:{name}"), name)(Call(completions=completions, row=row)))
    for outcome in outcomes:
        if isinstance(outcome, RewardError):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, RewardScore)]


def test_a_function_is_found_by_file_and_by_module():
    assert load_function("asyncrl.rewards.exact_match:exact_match") is exact_match
    assert scores("length", ["a", "abc"], {"prompt": "p"}) == [RewardScore(value=1.0), RewardScore(value=3.0)]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("just_a_name", "names no function"),
        ("/nowhere/reward.py:f", "there is no file"),
        (f"{FILE}:nothing", "It defines: .*length"),
        (f"{FILE}:not_a_function", "is a int"),
        ("no_such_package.rewards:f", "importing it failed: ModuleNotFoundError"),
    ],
)
def test_a_spec_that_names_nothing_is_refused_with_the_reason(spec, says):
    with pytest.raises(ConfigError, match=says):
        load_function(spec)


def test_a_file_that_fails_on_import_is_refused_with_its_error(tmp_path):
    (tmp_path / "broken.py").write_text("raise OSError('disk on fire')")
    with pytest.raises(ConfigError, match="disk on fire"):
        load_function(f"{tmp_path}/broken.py:f")
    (tmp_path / "broken.py").write_text("from .other import f")
    with pytest.raises(ConfigError, match=r"no known parent package\. A file .* write package\.module:name"):
        load_function(f"{tmp_path}/broken.py:f")


def test_a_reward_file_can_import_its_neighbours_and_define_dataclasses(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("BONUS = 2.0")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_reward import BONUS\n@dataclass\nclass A:\n    x: int\n"
        "def f(completion, row):\n    return BONUS + A(1).x\n"
    )
    assert load_function(f"{tmp_path}/mine.py:f")("", {}) == 3.0


def test_two_files_of_one_name_are_two_and_share_no_neighbour(tmp_path):
    """The second one was given the neighbour of the first, and scored by the code of another task."""
    for task in ("gsm8k", "math", "code"):
        (tmp_path / task).mkdir()
        (tmp_path / task / "reward.py").write_text(
            "import pickle\nclass Own:\n    pass\n"
            + ("" if task == "code" else f"import neighbour_of_{'two' if task == 'math' else 'one'} as of\n")
            + "def f(completion, row):\n    return pickle.loads(pickle.dumps(Own)) is Own\n"
        )
        for name in ("one", "two"):
            (tmp_path / task / f"neighbour_of_{name}.py").write_text(f"TASK = {task!r}")
    gsm8k, math, code = (load_function(f"{tmp_path}/{task}/reward.py:f") for task in ("gsm8k", "math", "code"))
    assert all(function("", {}) for function in (gsm8k, math, code))
    assert (gsm8k.__globals__["of"].TASK, math.__globals__["of"].TASK) == ("gsm8k", "math")
    (tmp_path / "code" / "reward.py").write_text("import neighbour_of_one\ndef f(completion, row):\n    return 0.0\n")
    with pytest.raises(ConfigError, match=r"imports neighbour_of_one from .*/code, and another .* from .*/gsm8k"):
        load_function(f"{tmp_path}/code/reward.py:f")


def test_a_neighbour_imported_by_a_call_is_its_own_or_an_error(tmp_path):
    """It was that of the file loaded last."""
    for task in ("gsm8k", "math", "code"):
        (tmp_path / task).mkdir()
        (tmp_path / task / "late_neighbour.py").write_text(f"TASK = {task!r}")
        top = "import late_neighbour\n" if task == "code" else ""
        (tmp_path / task / "reward.py").write_text(
            f"{top}def f(completion, row):\n    import late_neighbour\n    return late_neighbour.TASK\n"
        )
    (tmp_path / "code" / "numpy").mkdir()  # of data, which stands in for no module
    assert load_function(f"{tmp_path}/code/reward.py:f")("", {}) == "code"
    with pytest.raises(ConfigError, match=r"imports late_neighbour from .*/gsm8k, and another .* from .*/code"):
        load_function(f"{tmp_path}/gsm8k/reward.py:f")


def test_the_folder_of_a_file_is_on_the_path_only_while_it_loads(tmp_path):
    (tmp_path / "called_late.py").write_text("")
    (tmp_path / "mine.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path / 'added')!r})\n"
        "def f(completion, row):\n    import called_late\n"
    )
    before = list(sys.path)
    function = load_function(f"{tmp_path}/mine.py:f")
    try:
        assert sys.path == [str(tmp_path / "added"), *before]
    finally:
        sys.path[:] = before
    with pytest.raises(UserCodeError, match=r"reward\.function=mine raised ModuleNotFoundError.*\(mine\.py, line 4\)"):
        called(function, "reward.function=mine", "", {})


@pytest.mark.parametrize("where", ["", "    "])
def test_a_file_beside_a_reward_does_not_stand_in_for_a_module_of_python(tmp_path, monkeypatch, where):
    (tmp_path / "colorsys.py").write_text("IS_OURS = True")
    (tmp_path / "mine.py").write_text(
        f"{'' if where else 'import colorsys'}\ndef f(completion, row):\n"
        f"{'    import colorsys' if where else ''}\n    return hasattr(colorsys, 'IS_OURS')\n"
    )
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert load_function(f"{tmp_path}/mine.py:f")("", {}) is False


def test_code_that_exits_has_failed_and_does_not_end_its_process_as_if_all_were_done():
    def done():
        sys.exit(0)

    with pytest.raises(
        UserCodeError, match=r"learner\.hook=mine\.py:done raised SystemExit: 0 \(test_loader\.py, line \d+"
    ):
        called(done, "learner.hook=mine.py:done")


def test_a_function_of_no_known_signature_is_refused():
    with pytest.raises(ConfigError, match="cannot be called as"):
        adapt_reward(load_function(f"{FILE}:no_arguments"), "no_arguments")


def test_verl_compute_score_gets_its_columns_and_names_its_parts():
    row = {"prompt": "p", "data_source": "gsm", "reward_model": {"ground_truth": "4"}, "extra_info": {"easy": True}}
    assert scores("compute_score", ["4", "5"], row) == [
        RewardScore(value=1.0, parts={"easy": 1.0}),
        RewardScore(value=0.0, parts={"easy": 1.0}),
    ]


def test_verl_compute_score_without_its_column_names_the_column():
    with pytest.raises(RewardError, match=r"reward_model\.ground_truth"):
        scores("compute_score", ["4"], {"prompt": "p"})


def test_trl_reward_gets_the_whole_group_and_repeated_columns():
    row = {"prompt": "p", "answer": "x", "other": 1}
    assert [s.value for s in scores("trl_lengths", ["a", "abc"], row)] == [1.0, 3.0]


def test_trl_reward_of_a_chat_prompt_gets_messages():
    row = {"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}
    assert [s.value for s in scores("trl_lengths", ["a", "abc"], row)] == [1.0, 3.0]


def test_trl_reward_that_needs_a_missing_column_names_it():
    with pytest.raises(RewardError, match=r"needs the column.* answer"):
        scores("trl_lengths", ["a"], {"prompt": "p"})


def test_trl_reward_that_returns_too_few_numbers_is_an_error():
    with pytest.raises(RewardError, match="list of 2"):
        scores("trl_too_few", ["a", "b"], {"prompt": "p"})


def test_an_async_function_is_awaited():
    assert scores("asynchronous", ["a"], {"prompt": "p"})[0].value == 2.5


@pytest.mark.parametrize("what", ["none", "nan", "inf", "text", "no_score"])
def test_what_is_no_finite_number_is_an_error_and_never_a_score(what):
    with pytest.raises(RewardError):
        scores("by_command", ["a"], {"prompt": "p", "do": "return", "what": what})


@pytest.mark.parametrize("size", [1e308, -1e39, 2e15])
def test_a_number_that_float32_would_turn_into_nan_is_an_error(size: float):
    (outcome,) = settle(adapt_reward(lambda completion, row: size, "huge")(Call(completions=["a"], row={})))
    assert isinstance(outcome, RewardError) and outcome.reason == "no_number"
    assert f"huge returned {size:g}" in str(outcome) and "at most 1e+15 in size" in str(outcome)


def test_numpy_numbers_are_numbers_and_other_entries_are_left_out():

    def reward(completion, row):
        return {"score": np.float32(0.5), "count": np.int64(3), "why": "text"}

    assert adapt_reward(reward, "reward")(Call(completions=["a"], row={})) == [
        RewardScore(value=0.5, parts={"count": 3.0})
    ]


def test_exact_match_ignores_surrounding_space_only():
    assert exact_match(" cba\n", {"answer": "cba"}) == 1.0
    assert exact_match("cb a", {"answer": "cba"}) == 0.0
    assert exact_match("7", {"answer": 7}) == 1.0
    with pytest.raises(RewardError, match="column `answer`"):
        exact_match("a", {"prompt": "p"})


def test_with_a_model_the_function_names_what_is_made_of_it():
    judge = make_reward([RewardTerm(function=f"{FILE}:Judge", model="abc")])
    assert [score.value for score in judge(Call(completions=["x", "yy"], row={"prompt": "p"}))] == [5.0, 6.0]


@pytest.mark.parametrize(
    ("name", "model", "says"),
    [
        ("Judge", "broken", "with reward.model=broken failed: OSError: no weights there"),
        ("no_judge", "abc", "created a NoneType of reward.model=abc, which cannot be called"),
    ],
)
def test_what_cannot_be_made_of_a_model_is_refused(name, model, says):
    with pytest.raises(ConfigError, match=says):
        make_reward([RewardTerm(function=f"{FILE}:{name}", model=model)])
