"""Reward functions as in the documentation of verl and TRL, and several combined into one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from asyncrl.checks.rewards import RewardTerm, reward_terms
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.call import Call, CallClock, GroupReward
from asyncrl.rewards.forms import adapt_reward
from asyncrl.rewards.loader import make_reward, settle
from asyncrl.rewards.score import RewardScore
from asyncrl.rewards.several import combine
from asyncrl.schema import RewardConfig

FILE = str(Path(__file__).with_name("documented.py"))
GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}
"""A row as verl's preprocessing of GSM8K writes it."""


def term(function: str, /, **values: Any) -> RewardTerm:
    return RewardTerm(function=f"{FILE}:{function}", **values)


def outcomes(
    terms: RewardTerm | list[RewardTerm], completions: list[str], row: dict, ids: list[list[int]] | None = None
):
    packed = None if ids is None else [np.array(one, np.int32).tobytes() for one in ids]
    reasons = None if ids is None else ["stop", "length"][: len(ids)]
    call = Call(completions=completions, row=row, packed_ids=packed, finish_reasons=reasons)
    return settle(make_reward(terms if isinstance(terms, list) else [terms])(call))


def values(*arguments: Any) -> list[float]:
    return [outcome.value for outcome in outcomes(*arguments)]


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("get_longer_than", {}, [0.0, 1.0]),
        ("get_longer_than", {"shortest": 1}, [1.0, 1.0]),
        ("get_longer_than", {"shortest": 9, "least": -1}, [-1.0, -1.0]),
        ("get_word", {}, [0.0, 0.0]),
        ("get_word", {"word": "no"}, [1.0, 0.0]),
    ],
)
def test_a_function_that_makes_the_reward_is_called_once_with_its_arguments(name, args, expected):
    assert values(term(name, args=args), ["no", "well"], {"prompt": "p"}) == expected


def test_what_makes_no_reward_is_refused_with_its_signature():
    with pytest.raises(ConfigError, match=r"get_number\(number=1.0\) cannot be called as f\(completion, row\)"):
        outcomes(term("get_number"), ["a"], {"prompt": "p"})


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("p", r"IndexError: .*prompt is text, `completions` are texts"),
        ([{"role": "user", "content": "p"}], r"TypeError: .*prompt is messages, `completions` are lists of messages"),
    ],
)
def test_a_function_of_trl_for_the_other_kind_of_prompt_is_told_which_kind_it_got(prompt, says):
    with pytest.raises(RewardError, match=says):
        outcomes(term("think_then_answer" if prompt == "p" else "boxed"), [""], {"prompt": prompt, "ground_truth": ""})


def test_an_error_names_the_line_of_the_users_file_and_none_where_the_call_itself_fails():
    (raised,) = outcomes(term("breaks"), ["a"], {"prompt": "p"})
    assert re.search(r"ValueError: invalid literal.* \(documented\.py, line \d+\)$", str(raised))
    (unfit,) = outcomes(RewardTerm(function="math:pow"), ["a"], {"prompt": "p"})
    assert str(unfit).endswith("TypeError: must be real number, not str")


def test_verls_functions_run_as_its_documentation_shows_them():
    assert values(term("my_reward_fn"), ["x" * 50], GSM8K) == [0.5]
    (right, wrong, none) = outcomes(term("compute_score"), ["#### 72", "#### 7", "72"], GSM8K)
    assert (right, wrong.value, none.value) == (RewardScore(value=1.0, parts={"acc": 1.0}), 0.1, 0.0)


def test_verls_reward_kwargs_are_reward_args():
    assert values(term("compute_score", args={"format_score": 0.25, "any": "of **kwargs"}), ["#### 7"], GSM8K) == [0.25]


def test_verls_batch_form_is_called_once_for_the_group():
    assert values(term("compute_score_batch"), ["it is 72", "it is 7"], GSM8K) == [1.0, 0.0]
    assert values(term("compute_score_batch", args={"scale": 3}), ["it is 72", "it is 7"], GSM8K) == [3.0, 0.0]


@pytest.mark.parametrize("name", ["longer_by_tokens", "longer_by_tokens_as_once_spelt"])
def test_trls_functions_get_token_ids(name):
    assert values(
        term(name), [" blue.", " in the sky."], {"prompt": "The sky"}, [[6303, 13], [304, 279, 12884, 13]]
    ) == [2, 4]
    with pytest.raises(RewardError, match=r"passed none with the completions.*sampled=completions"):
        outcomes(term(name), ["a"], {"prompt": "p"})


def test_trls_functions_run_as_its_documentation_shows_them():
    assert values(term("longer"), [" blue.", " in the sky."], {"prompt": "p"}) == [6.0, 12.0]
    chat = {"prompt": [{"role": "user", "content": "(1 + 2) * 4?"}]}
    assert values(term("think_then_answer"), ["<think>12</think><answer>12</answer>", "12"], chat) == [1.0, 0.0]
    row = {"prompt": "2x + 3 = 7", "ground_truth": "2"}
    assert values(term("boxed"), [r"It is \boxed{2}.", r"It is \boxed{6}."], row) == [1.0, 0.0]
    assert values(term("slowly_judged"), ["a", ""], {"prompt": "p"}) == [1.0, 0.0]


def test_what_trl_gives_and_nobody_has_here_is_none():
    assert values(term("by_the_state"), ["a"], {"prompt": "p"}) == [0.0]


def test_what_trls_functions_log_are_parts_of_the_reward():
    a, b = outcomes(term("logging_beside"), ["xy", "z"], {"prompt": "p"})
    assert (a, b) == (
        RewardScore(value=1.0, parts={"length": 2.0, "share": 0.25}),
        RewardScore(value=1.0, parts={"length": 1.0, "share": 0.25}),
    )
    (only,) = outcomes(term("logging_by_keyword"), ["xy"], {"prompt": "p"})
    assert only == RewardScore(value=1.0, parts={"share": 0.5})


def test_none_is_left_out_of_the_sum_and_nothing_but_none_is_a_failure():
    both = [term("only_math", name="math", weight=2.0), term("only_code", name="code")]

    (math,) = outcomes(both, ["a"], {"prompt": "p", "task": "math"})
    (code,) = outcomes(both, ["a"], {"prompt": "p", "task": "code"})
    (neither,) = outcomes(both, ["a"], {"prompt": "p", "task": "poem"})
    (alone,) = outcomes(term("only_math"), ["a"], {"prompt": "p", "task": "poem"})

    assert math == RewardScore(value=2.0, parts={"math": 1.0})
    assert code == RewardScore(value=-1.0, parts={"code": -1.0})
    for failure in (neither, alone):
        assert isinstance(failure, RewardError) and failure.reason == "no_number" and "None" in str(failure)


def test_several_are_summed_with_their_weights_and_each_is_a_part():
    terms = [
        term("compute_score", name="right"),
        term("slowly_judged", name="said", weight=0.5),
        RewardTerm(
            name="form", function="asyncrl.rewards.library.layout:Format", weight=0.2, args={"pattern": "####.*"}
        ),
    ]

    first, second = outcomes(terms, ["#### 72", "72"], GSM8K)

    assert first == RewardScore(value=1.7, parts={"right": 1.0, "right/acc": 1.0, "said": 1.0, "form": 1.0})
    assert second == RewardScore(value=0.5, parts={"right": 0.0, "right/acc": 0.0, "said": 1.0, "form": 0.0})


def test_a_sum_that_is_too_large_to_train_on_is_a_failure():
    fixed = lambda value: lambda call: [RewardScore(value=value)]  # noqa: E731
    terms = [RewardTerm(name=name, function="m:f", weight=1e9) for name in ("one", "other")]
    both = combine([(terms[0], fixed(1e9)), (terms[1], fixed(-2e9))])
    (failure,) = settle(both(Call(completions=["a"], row={})))
    assert isinstance(failure, RewardError) and "the weighted sum of the rewards returned -1e+18" in str(failure)


def test_one_of_several_that_fails_fails_the_completion_by_its_name():
    terms = [term("my_reward_fn", name="length"), term("boxed", name="box")]
    (failure,) = outcomes(terms, ["a"], GSM8K)

    assert isinstance(failure, RewardError)
    assert str(failure).startswith("box: ") and "needs the column(s) ground_truth" in str(failure)


def test_a_data_source_picks_the_functions_that_name_it():
    terms = [
        term("my_reward_fn", name="gsm", data_source=("openai/gsm8k",)),
        term("compute_score", name="other", data_source=("math", "aime")),
    ]

    assert outcomes(terms, ["x" * 50], GSM8K) == [RewardScore(value=0.5, parts={"gsm": 0.5})]
    assert outcomes(terms, ["#### 72"], GSM8K | {"data_source": "aime"})[0].parts.keys() == {"other", "other/acc"}
    with pytest.raises(
        RewardError, match=r"no reward of reward.functions is for data_source='poems'; they are for aime"
    ):
        outcomes(terms, ["x"], GSM8K | {"data_source": "poems"})


def scores(reward: GroupReward, call: Call) -> list[RewardScore]:
    found = settle(reward(call))
    assert all(isinstance(each, RewardScore) for each in found), found
    return [each for each in found if isinstance(each, RewardScore)]


def test_ours_may_ask_for_every_turn_and_say_what_each_earned():
    def polite(completion, row, turns):
        return {"score": float(len(turns)), "turns": [float("please" in turn) for turn in turns]}

    reward, given = adapt_reward(polite, "polite"), [["please", "more"], ["now"]]
    found = scores(reward, Call(completions=["more", "now"], row={}, turns=given))
    assert [(each.value, each.turns, each.parts) for each in found] == [(2.0, (1.0, 0.0), {}), (1.0, (0.0,), {})]
    (alone,) = scores(reward, Call(completions=["please"], row={}, packed_ids=[b""], finish_reasons=["stop"]))
    assert alone.turns == (1.0,), "what was sampled at once is one turn"
    with pytest.raises(RewardError, match="needs turns, but the environment passed none"):
        reward(Call(completions=["please"], row={}))


def test_rewards_of_turns_are_summed_with_the_weights_and_must_be_of_the_same_turns():
    def said(value: float, *turns: float) -> GroupReward:
        return lambda call: [RewardScore(value=value, turns=turns)]

    terms = [
        RewardTerm(function="f", name=name, weight=weight) for name, weight in (("a", 2.0), ("b", 0.5), ("c", 1.0))
    ]
    call = Call(completions=["x"], row={})
    three = said(3.0, 1.0, 2.0), said(1.0), said(1.0, 0.0, 1.0)
    (whole,) = scores(combine(list(zip(terms, three, strict=True))), call)
    assert (whole.value, whole.turns) == (7.5, (2.0, 5.0))
    other = said(3.0, 1.0, 2.0), said(1.0), said(1.0, 1.0)
    (refused,) = settle(combine(list(zip(terms, other, strict=True)))(call))
    assert isinstance(refused, RewardError) and "c returned `turns` for 1 turns, but another reward for 2" in str(
        refused
    )


def test_ours_may_ask_for_token_ids_and_why_a_completion_ended():
    first, second = outcomes(term("with_ids", args={"bonus": 1.0}), ["a", "b"], {"prompt": "p"}, [[1], [1, 2]])

    assert first == RewardScore(value=2.0, parts={"cut": 0.0})
    assert second == RewardScore(value=3.0, parts={"cut": 1.0})


def test_a_class_is_made_with_its_arguments():
    assert values(term("Scaled", args={"scale": 2.0, "offset": 1.0}), ["abc"], {"prompt": "p"}) == [7.0]
    with pytest.raises(ConfigError, match=r"making .*Scaled failed: TypeError.*scale"):
        make_reward([term("Scaled")])


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        (
            "compute_score",
            {"solution_str": "x"},
            r"reward.args.solution_str: .*compute_score\(data_source.*takes no such",
        ),
        ("my_reward_fn", {"scale": 1}, r"my_reward_fn\(data_source.* takes no such argument. It takes none"),
        ("with_ids", {"malus": 1}, "takes no such argument. It takes bonus"),
        ("Scaled", {"scale": 1, "size": 2}, "takes no such argument. It takes scale, offset"),
    ],
)
def test_an_argument_that_a_function_does_not_take_is_refused_with_its_signature(name, args, says):
    with pytest.raises(ConfigError, match=says):
        make_reward([term(name, args=args)])


def test_settings_name_one_function_or_several():
    assert reward_terms(RewardConfig(function="gsm8k", args={"method": "flexible"})) == (
        RewardTerm(function="asyncrl.rewards.library.gsm8k:gsm8k", args={"method": "flexible"}),
    )
    several = {"right": "gsm8k", "style": {"function": "my.py:f", "weight": 0.2, "data_source": "a", "args": {"b": 1}}}
    assert reward_terms(RewardConfig(function="", functions=several)) == (
        RewardTerm(name="right", function="asyncrl.rewards.library.gsm8k:gsm8k"),
        RewardTerm(name="style", function="my.py:f", weight=0.2, data_source=("a",), args={"b": 1}),
    )
    assert reward_terms(RewardConfig(function="")) == ()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"function": "gsm8"}, "got 'gsm8'. Did you mean `gsm8k`"),
        ({"function": "f1", "functions": {"a": "f1"}}, "contradict each other"),
        ({"function": "", "functions": {"a": "f1"}, "args": {"b": 1}}, "Set those of each of reward.functions there"),
        ({"function": "", "functions": {"a": {"weight": 1}}}, "reward.functions.a=.* does not name a function"),
        ({"function": "", "functions": {"a": {"function": "f1", "wieght": 1}}}, "a.wieght.*Did you mean `weight`"),
        ({"function": "", "functions": {"a": {"function": "f1", "weight": "x"}}}, "weight must be a number; got 'x'"),
        ({"function": "", "functions": {"a": {"function": "f1", "args": [1]}}}, "args must be a mapping"),
    ],
)
def test_settings_that_name_no_reward_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        reward_terms(RewardConfig(**settings))


def test_one_that_goes_on_when_it_is_cancelled_is_left_at_its_deadline() -> None:
    async def deaf(completion: str, row: dict) -> float:
        while completion == "deaf" and not over:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return 1.0

    async def scenario() -> None:
        clock = CallClock(0.05, lambda _: None)
        call = Call(completions=["deaf", "a"], row={"prompt": "p"})
        late, fine = await cast(Any, adapt_reward(deaf, "deaf", clock)(call))
        assert isinstance(late, RewardError) and late.reason == "timed_out"
        assert isinstance(fine, RewardScore) and fine.value == 1.0
        (going,) = clock.left
        over.append(True)
        await going
        assert not clock.left

    over: list[bool] = []
    asyncio.run(scenario())


def test_what_a_function_writes_into_its_row_neither_siblings_nor_other_functions_see(tmp_path: Path) -> None:
    (tmp_path / "takes.py").write_text(
        """
def ours(completion, row):
    row["reward_model"]["ground_truth"] += "!"
    return len(row.pop("ability")) + len(row["reward_model"]["ground_truth"])
def verls(solution_str, ground_truth, extra_info):
    return 1 / (1 + extra_info.pop("index"))
def batch(solution_strs, ground_truths, extra_infos):
    return [1 / (1 + each.pop("index")) for each in extra_infos]
def trls(prompts, completions, extra_info, **kwargs):
    return [len(prompt.pop()["content"]) / (1 + each.pop("index")) for prompt, each in zip(prompts, extra_info)]
"""
    )
    terms = [
        RewardTerm(function=f"{tmp_path}/takes.py:{name}", name=name) for name in ("ours", "verls", "batch", "trls")
    ]
    assert values(terms, ["a", "b"], GSM8K) == values(terms, ["a", "b"], GSM8K) == [4 + 3 + 1 + 1 + 9] * 2
