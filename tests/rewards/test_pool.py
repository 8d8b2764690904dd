from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from asyncrl.checks.rewards import RewardTerm
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.child import MOST_LEFT
from asyncrl.rewards.pool import MAX_GUILTY, RewardPool
from asyncrl.types import Completion

FILE = str(Path(__file__).with_name("reward_functions.py"))
DOCUMENTED = str(Path(__file__).with_name("documented.py"))
COMMANDS = f"{FILE}:by_command"
DOCUMENTED = str(Path(__file__).with_name("documented.py"))

pytestmark = pytest.mark.timeout(400)


run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run
"""Each test knows which outcomes are scores and which are errors."""

HANG_S = 8.0
"""Deadline that a test sits out: longer than a busy machine stands still, or good calls would be killed too."""

SAT_OUT: list[Callable[[], Coroutine[Any, Any, Any]]] = []


def sits_out(scenario: Callable[[], Coroutine[Any, Any, Any]]) -> Callable[[], Coroutine[Any, Any, Any]]:
    SAT_OUT.append(scenario)
    return scenario


@pytest.fixture(scope="module")
def came() -> dict[Callable[[], Coroutine[Any, Any, Any]], Any]:
    """What each scenario that sits deadlines out gives, run side by side: one after the other they take a minute."""

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(scenario() for scenario in SAT_OUT))

    return dict(zip(SAT_OUT, run(all_of_them()), strict=True))


def row(do: str, **columns) -> dict:
    return {"prompt": "p", "do": do, **columns}


def reward_processes() -> list[psutil.Process]:
    """Children of this process; not what other tests have it keep."""
    return [child for child in psutil.Process().children() if "asyncrl.rewards.child" in " ".join(child.cmdline())]


def test_scores_come_back_per_completion_with_named_parts():
    async def scenario():
        async with RewardPool(COMMANDS, workers=1, timeout_s=30) as pool:
            return await pool.score(["a", "abc"], row("fine"))

    first, second = run(scenario())
    assert (first.value, first.parts) == (1.0, {"letters": 1.0})
    assert second.parts == {"letters": 3.0}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (row("exit"), "exit code 3"),
        (row("sys_exit"), "exit code 4"),
        (row("segfault"), "signal SIGSEGV"),
        (row("child_process"), "exit code 5"),
        (row("raise"), "KeyError.*no such thing"),
        (row("return", what="nan"), "nan"),
        (row("return", what="none"), "None"),
        (row("fine", deep=reduce(lambda inner, _: [inner], range(2000), 1)), "cannot be sent"),
    ],
    ids=lambda value: value.get("what", value["do"]) if isinstance(value, dict) else "",
)
def test_a_bad_call_fails_alone_and_its_batch_mates_succeed(bad, says):
    async def scenario():
        async with RewardPool(COMMANDS, workers=1, timeout_s=30) as pool:
            before = [pool.score(["before"], row("fine")) for _ in range(5)]
            after = [pool.score(["after"], row("fine")) for _ in range(5)]
            return await asyncio.gather(*before, pool.score(["bad"], bad), *after, return_exceptions=True)

    results = run(scenario())
    failure = results.pop(5)
    assert isinstance(failure, RewardError)
    with pytest.raises(RewardError, match=says):
        raise failure
    assert [[score.value for score in scores] for scores in results] == [[1.0]] * 10


@sits_out
async def two_hang():
    async with RewardPool(COMMANDS, workers=2, timeout_s=HANG_S) as pool, asyncio.timeout(100):
        while not all(process.ready for process in pool._processes):
            await asyncio.sleep(0.01)
        kinds = ["hang" if i == 5 else "hang_in_c" if i == 10 else "fine" for i in range(16)]  # in both processes
        results = await asyncio.gather(*(pool.score(["a"], row(k)) for k in kinds), return_exceptions=True)
        return dict(enumerate(results))


def test_calls_that_hang_in_python_or_in_c_are_killed_alone_at_their_deadline(came):
    results = came[two_hang]
    for number in (5, 10):
        assert isinstance(failure := results.pop(number), RewardError)
        assert f"reward.timeout_s={HANG_S:g}" in str(failure)
    assert [scores[0].value for scores in results.values()] == [1.0] * 14


@pytest.mark.parametrize("name", ["picky", "trl_picky"])
def test_a_completion_that_cannot_be_scored_leaves_its_siblings_theirs(name):
    async def scenario():
        async with RewardPool(f"{FILE}:{name}", workers=1, timeout_s=30) as pool:
            some = await pool.score(["a", "bad", "c"], row(""))
            none = await asyncio.gather(pool.score(["bad", "bad"], row("")), return_exceptions=True)
            return some, none, pool.stats()

    (first, failed, third), (none,), stats = run(scenario())
    assert first.value == third.value == 1.0
    assert isinstance(failed, RewardError) and isinstance(none, RewardError)
    assert stats["reward_failures"] == 2


def test_a_function_that_is_not_async_has_an_event_loop_of_its_own():
    async def scenario():
        async with RewardPool(f"{DOCUMENTED}:with_a_loop_of_its_own", workers=1, timeout_s=30) as pool:
            rows = [{"prompt": "p", "closes": closes} for closes in (False, True, False, False)]
            return await asyncio.gather(*(pool.score(["a", "b"], row) for row in rows))

    assert [[score.value for score in scores] for scores in run(scenario())] == [[1.0, 1.0]] * 4


MIXED = ["a", "raise", "bb", "nan", "exit", "ccc", "hang", "dddd"]


@sits_out
async def a_mixed_group():
    async with RewardPool(f"{FILE}:mixed", workers=1, timeout_s=HANG_S) as pool:
        return await pool.score(MIXED, row(""))


def test_completions_that_raise_hang_exit_or_give_nan_cost_no_sibling_its_score(came):
    outcomes = dict(zip(MIXED, came[a_mixed_group], strict=True))
    reasons = {text: o.reason for text, o in outcomes.items() if isinstance(o, RewardError)}
    assert reasons == {"raise": "raised", "nan": "no_number", "exit": "exited", "hang": "timed_out"}
    scores = {text: o.value for text, o in outcomes.items() if not isinstance(o, RewardError)}
    assert scores == {"a": 1.0, "bb": 2.0, "ccc": 3.0, "dddd": 4.0}


def test_a_reward_that_always_ends_its_process_is_given_up_before_it_has_cost_one_for_each_completion():
    async def scenario():
        async with RewardPool(f"{FILE}:mixed", workers=1, timeout_s=30) as pool:
            (error,) = await asyncio.gather(pool.score(["exit"] * 8, row("")), return_exceptions=True)
            return error, pool.stats()

    error, stats = run(scenario())
    assert isinstance(error, RewardError) and "exit code 3" in str(error)
    assert stats["reward_restarts"] == MAX_GUILTY


@sits_out
async def a_long_group():
    async with RewardPool(f"{FILE}:slowly", workers=1, timeout_s=HANG_S) as pool:
        return await pool.score(["a"] * 5, row("", seconds=1.7))  # together longer than one may take


def test_the_deadline_is_that_of_each_completion_and_not_of_the_group(came):
    assert [score.value for score in came[a_long_group]] == [1.0] * 5


@sits_out
async def a_patient_group():
    terms = [RewardTerm(function=f"{FILE}:crowd", args={"wanted": 8})]
    async with RewardPool(terms, workers=1, timeout_s=60) as pool:
        return await pool.score(["a"] * 8, row(""))


@sits_out
async def one_that_can_be_cancelled():
    async with RewardPool(f"{FILE}:waits", workers=1, timeout_s=HANG_S) as pool:
        return await pool.score(["hang", "0"], row(""))


@sits_out
async def one_that_cannot():
    async with RewardPool(f"{FILE}:waits", workers=1, timeout_s=HANG_S) as pool:
        return await pool.score(["deaf", "0"], row(""))


def test_async_calls_of_a_group_run_side_by_side_each_with_its_deadline(came):
    together = came[a_patient_group]
    (hung, well), (deaf, innocent) = came[one_that_can_be_cancelled], came[one_that_cannot]
    assert [score.value for score in together] == [8.0] * 8
    assert isinstance(hung, RewardError) and hung.reason == "timed_out" and well.value == 1.0
    # One that will not be cancelled holds up all: its process is killed, and the others are scored in the next one.
    assert isinstance(deaf, RewardError) and deaf.reason == "timed_out" and innocent.value == 1.0


@pytest.mark.parametrize(("at_once", "side_by_side"), [(2, 2), (64, 16)])
def test_async_calls_of_many_groups_run_side_by_side_as_far_as_they_may(at_once: int, side_by_side: int):
    async def scenario() -> list[float]:
        terms = [RewardTerm(function=f"{FILE}:crowd", args={"wanted": side_by_side})]
        async with RewardPool(terms, workers=1, timeout_s=60, at_once=at_once) as pool:
            scored: Any = await asyncio.gather(*(pool.score(["a"], row("")) for _ in range(16)))
            return [scores[0].value for scores in scored]

    assert max(run(scenario())) == side_by_side


@sits_out
async def many_that_go_on():
    async with RewardPool(f"{FILE}:will_not_end", workers=1, timeout_s=HANG_S) as pool:
        first = await pool.score(["deaf", "a"], row(""))
        crowd = await pool.score(["deaf"] * MOST_LEFT + ["a"], row(""))
        return first, pool.stats()["reward_restarts"], crowd, await pool.score(["a"], row("")), pool.stats()


def test_async_calls_that_go_on_when_they_are_cancelled_cost_one_deadline_and_no_sibling(came):
    (deaf, well), restarts, crowd, (last,), stats = came[many_that_go_on]
    assert isinstance(deaf, RewardError) and deaf.reason == "timed_out" and well.value == 1.0
    assert restarts == 0, "the process went on"
    assert [outcome.reason for outcome in crowd[:-1]] == ["timed_out"] * MOST_LEFT and crowd[-1].value == 1.0
    assert last.value == 1.0 and stats["reward_restarts"] == 1, "it went for a fresh one with so many left behind"


@sits_out
async def one_that_blocks_another_group():
    async with RewardPool(f"{FILE}:waits", workers=1, timeout_s=HANG_S) as pool:
        return await asyncio.gather(
            pool.score(["deaf"], row("")), pool.score(["0.1"] * 2, row("")), return_exceptions=True
        )


@sits_out
async def one_that_blocks_before_the_next_group_has_begun():
    async with RewardPool(f"{FILE}:waits", workers=1, timeout_s=HANG_S) as pool:
        groups = (["blocks"], ["0.1"] * 2)  # they come in one message
        return await asyncio.gather(*(pool.score(texts, row("")) for texts in groups), return_exceptions=True)


def test_one_that_blocks_within_async_is_blamed_alone(came):
    for scenario in (one_that_blocks_another_group, one_that_blocks_before_the_next_group_has_begun):
        blocked, fine = came[scenario]
        assert isinstance(blocked, RewardError) and blocked.reason == "timed_out"
        assert not isinstance(fine, RewardError) and [score.value for score in fine] == [1.0, 1.0]


def test_one_that_exits_within_async_is_blamed_alone():
    async def ask():
        async with RewardPool(f"{FILE}:waits", workers=1, timeout_s=20.0) as pool:
            return await asyncio.gather(pool.score(["0.2", "exits"], row("")), pool.score(["0.2", "0"], row("")))

    (own, said), others = run(ask())
    assert isinstance(said, RewardError) and said.reason == "exited" and "exit code 4" in str(said)
    assert [scored.value for scored in (own, *others)] == [1.0] * 3


def test_a_plain_function_may_use_a_loop_of_its_own():
    async def scenario():
        async with RewardPool(f"{DOCUMENTED}:in_turn", workers=1, timeout_s=60) as pool:
            return await pool.score(["a"], row(""))

    assert run(scenario())[0].value == 1.0


def test_token_ids_and_finish_reasons_reach_the_function_with_the_completions_that_are_left():
    """The first of them ends its process: the others are sent again."""
    ids = [np.arange(n, dtype=np.int32) for n in (1, 2, 3)]
    sampled = [
        Completion(token_ids=one, logprobs=one.astype(np.float32), policy_versions=one, finish_reason=reason)
        for one, reason in zip(ids, ("stop", "length", "stop"), strict=True)
    ]
    terms = [
        RewardTerm(name="ids", function=f"{DOCUMENTED}:with_ids"),
        RewardTerm(name="may", function=f"{FILE}:mixed", weight=0.0),
    ]

    async def scenario():
        async with RewardPool(terms, workers=1, timeout_s=60) as pool:
            return await pool.score(["exit", "a", "b"], row(""), sampled=sampled)

    ended, cut, whole = run(scenario())
    assert isinstance(ended, RewardError) and ended.reason == "exited"
    assert str(ended) == "ids + may: may: the call ended its process (exit code 3)"
    assert cut.parts == {"ids": 2.0, "ids/cut": 1.0, "may": 1.0}
    assert whole.parts == {"ids": 3.0, "ids/cut": 0.0, "may": 1.0}


def test_output_and_input_of_user_code_do_not_disturb_the_pipe():
    async def scenario():
        async with RewardPool(COMMANDS, workers=1, timeout_s=30) as pool:
            noisy = [pool.score(["a"], row("print")) for _ in range(20)]
            return await asyncio.gather(*noisy, pool.score(["a"], row("read_stdin")))

    assert all(scores[0].value == 1.0 for scores in run(scenario()))


@sits_out
async def one_of_several_hangs():
    async def said_by(function: str) -> str:
        names = {"long": "length", "judge": function, "last": "length"}
        terms = [RewardTerm(name=name, function=f"{FILE}:{each}") for name, each in names.items()]
        async with RewardPool(terms, workers=1, timeout_s=HANG_S) as pool:
            (error,) = await asyncio.gather(pool.score(["hang"], row("")), return_exceptions=True)
            return str(error)

    return await asyncio.gather(said_by("mixed"), said_by("hangs_for_all"))


def test_of_several_functions_the_one_that_hangs_is_named(came):
    why = f"long + judge + last: judge: the call ran longer than reward.timeout_s={HANG_S:g} s and was killed"
    assert came[one_of_several_hangs] == [why, why]


@sits_out
async def several_bad():
    async with RewardPool(COMMANDS, workers=2, timeout_s=HANG_S) as pool:
        kinds = ["exit" if i % 10 == 3 else "hang" if i == 7 else "fine" for i in range(40)]
        results = await asyncio.gather(*(pool.score(["a"], row(k)) for k in kinds), return_exceptions=True)
        return kinds, results, pool.stats()


def test_several_bad_calls_in_one_batch_each_fail_and_all_others_succeed(came):
    kinds, results, stats = came[several_bad]
    for kind, result in zip(kinds, results, strict=True):
        assert isinstance(result, RewardError) == (kind != "fine"), (kind, result)
    assert stats["reward_failures"] == sum(kind != "fine" for kind in kinds)


@sits_out
async def a_long_queue():
    async with RewardPool(COMMANDS, workers=1, timeout_s=HANG_S) as pool:
        return await asyncio.gather(*(pool.score(["a"], row("slow")) for _ in range(420)))  # 8.4 s together


def test_a_deadline_counts_from_the_start_of_the_call_and_not_from_its_queueing(came):
    assert len(came[a_long_queue]) == 420


def test_a_child_killed_from_outside_while_idle_is_replaced():
    async def scenario():
        async with RewardPool(COMMANDS, workers=1, timeout_s=30) as pool:
            await pool.score(["a"], row("fine"))
            (child,) = reward_processes()
            child.kill()
            return await pool.score(["a"], row("fine"))

    assert run(scenario())[0].value == 1.0


def test_a_function_that_cannot_be_loaded_is_refused_at_start():
    async def scenario(spec):
        async with RewardPool(spec, workers=2, timeout_s=1):
            pass

    with pytest.raises(ConfigError, match="there is no file"):
        run(scenario("/nowhere/r.py:f"))
    assert not reward_processes()


def test_a_file_that_kills_its_process_on_import_is_refused_at_start(tmp_path):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(7)")

    async def scenario():
        async with RewardPool(f"{tmp_path}/deadly.py:f", workers=1, timeout_s=1):
            pass

    with pytest.raises(ConfigError, match="exit code 7"):
        run(scenario())


def test_failures_are_logged_with_their_reason_at_every_power_of_ten(caplog: pytest.LogCaptureFixture):
    async def scenario():
        async with RewardPool(COMMANDS, workers=1, timeout_s=30) as pool:
            calls = [pool.score(["a"], row("raise")) for _ in range(12)]
            await asyncio.gather(*calls, return_exceptions=True)

    run(scenario())
    said = [record.getMessage() for record in caplog.records if record.name == "asyncrl.rewards.pool"]
    assert [text.split(",")[0] for text in said] == ["reward failure 1", "reward failure 10"]
    assert "KeyError" in said[0]


def test_closing_fails_open_calls_and_leaves_no_process():
    async def scenario():
        pool = RewardPool(COMMANDS, workers=2, timeout_s=100)
        await pool.start()
        open_call = asyncio.ensure_future(pool.score(["a"], row("hang")))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises(RewardError, match="closed"):
            await open_call

    run(scenario())
    assert not reward_processes()


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal")
def test_a_reward_stuck_in_c_code_does_not_outlive_a_killed_worker():
    script = (
        "import asyncio\nfrom asyncrl.rewards.pool import RewardPool\n"
        "async def main():\n"
        f"    pool = RewardPool({COMMANDS!r}, workers=1, timeout_s=600)\n"
        "    await pool.start()\n    print('ready', flush=True)\n"
        "    await pool.score(['a'], {'prompt': 'p', 'do': 'hang_in_c'})\nasyncio.run(main())"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(parent.pid).children()
        time.sleep(0.2)
        os.kill(parent.pid, signal.SIGKILL)
        child.wait(timeout=100)
    finally:
        parent.kill()
        parent.wait()
