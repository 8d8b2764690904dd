"""Environments that exchange messages, and the trajectory that results, with tokens as they were sampled."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from asyncrl.chat.choice import open_chat
from asyncrl.environments.chat import ChatEnvironment
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.registry import make_environment
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.rewards.score import RewardScore
from asyncrl.schema import EnvironmentConfig
from tests.chat.markers import tokenizer
from tests.environments.talk import CHAT, TOKENIZER, Scripted, exact, play, sampled_texts


class Talk(ChatEnvironment):
    """Does what the test says."""

    def __init__(self, episode: Any) -> None:
        self._do = episode

    async def episode(self, chat: Conversation, row: dict[str, Any]) -> Any:
        return await self._do(chat, row)


async def three_turns(chat: Conversation, row: dict[str, Any]) -> float:
    for said in ("more", "and more"):
        await chat.reply()
        chat.user(said)
    last = await chat.reply()
    return float(last.content == "bye")


async def test_an_episode_is_one_trajectory_of_what_was_sampled() -> None:
    episodes, engine = await play(Talk(three_turns), ["hello", "<think>hm</think>hello", "bye"], size=2)
    assert sampled_texts(episodes) == ["hello<|im_end|>", "<think>hm</think>hello<|im_end|>", "bye<|im_end|>"]
    assert [each.reward for each in episodes.trajectories] == [1.0, 1.0]
    exact(episodes, engine)
    assert episodes.texts[0].startswith("hello<|im_end|>\n<|im_start|>user\nmore<|im_end|>")
    spelled = episodes.trajectories[0].token_ids.tolist()
    assert TOKENIZER.convert_tokens_to_ids("hello") not in spelled, "something sampled was tokenized again"


async def test_siblings_that_begin_alike_are_one_request() -> None:
    _, engine = await play(Talk(three_turns), ["hello", "x", "bye"], size=4)
    # They go on alike here too; what a policy samples differs.
    assert [request.n for request in engine.requests] == [4, 4, 4]


async def test_what_is_added_before_the_first_reply_is_prompt() -> None:
    async def episode(chat: Conversation, row: dict[str, Any]) -> float:
        chat.system("Be brief.")
        await chat.reply()
        return 1.0

    episodes, engine = await play(Talk(episode), ["ok"])
    text = TOKENIZER.decode(engine.requests[0].prompt_ids.tolist())
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    exact(episodes, engine)


async def test_an_episode_without_a_reward_of_its_own_is_scored_with_its_siblings_in_one_call() -> None:
    asked: list[list[str]] = []

    async def score(texts: list[str], row: dict[str, Any], **_: Any) -> list[RewardScore]:
        asked.append(texts)
        return [RewardScore(value=0.5, parts={"right": 1.0})] * len(texts)

    async def episode(chat: Conversation, row: dict[str, Any]) -> None:
        await chat.reply()
        chat.reward(0.25, "polite")

    episodes, _ = await play(Talk(episode), ["42"], size=3, score=score)
    assert asked == [["42"] * 3]
    (first, *_) = episodes.trajectories
    assert (first.reward, first.rewards) == (0.75, {"right": 1.0, "polite": 0.25})


async def test_a_reward_is_its_turn_s_and_what_nobody_gave_a_turn_is_the_last_one_s() -> None:
    async def episode(chat: Conversation, row: dict[str, Any]) -> float:
        chat.reward(9.0, "early")  # before any turn: of none
        await chat.reply()
        chat.reward(0.25)
        chat.reward(0.5, name="")
        chat.user("more")
        await chat.reply(temperature=0.5)
        chat.reward(-1.0)  # of a turn that is not trained on: of the last before it that is
        chat.user("and more")
        await chat.reply()
        return 2.0

    episodes, _ = await play(Talk(episode), ["hello", "x", "bye"], size=2)
    for trajectory in episodes.trajectories:
        assert sampled_texts(episodes) == ["hello<|im_end|>", "bye<|im_end|>"]
        assert trajectory.turn_rewards == (-0.25, 0.0) and trajectory.reward == 10.75
        assert trajectory.rewards == {"early": 9.0, "turn": -0.75}


@pytest.mark.parametrize(
    ("turns", "says"), [((1.0, 0.0, -0.5), ""), ((1.0,), "`turns` for 1 turns, but the environment")]
)
async def test_a_reward_function_is_given_every_turn_and_says_what_each_earned(turns: Any, says: str) -> None:
    asked: list[Any] = []

    async def asks(chat: Conversation, row: dict[str, Any]) -> None:
        await three_turns(chat, row)

    async def score(texts: list[str], row: dict[str, Any], **told: Any) -> list[Any]:
        asked.append((texts, told["turns"]))
        return [RewardScore(value=0.75, turns=turns) for _ in texts]

    episodes, _ = await play(Talk(asks), ["hello", "more", "bye"], size=2, score=score)
    assert asked == [(["bye"] * 2, [["hello", "more", "bye"]] * 2)]
    assert [each.turn_rewards for each in episodes.trajectories] == ([] if says else [turns] * 2)
    assert all(says in str(failure) for failure in episodes.failures) and bool(episodes.failures) == bool(says)


async def test_the_end_of_the_context_is_an_outcome_with_a_reward() -> None:
    async def for_ever(chat: Conversation, row: dict[str, Any]) -> float:
        while True:
            await chat.reply()
            chat.user("more " * 20)

    environment = Talk(for_ever)
    environment.reward_when_over = 0.125
    engine = Scripted(lambda text: "hello " * 10)
    engine.max_length = 600
    episodes, _ = await play(environment, None, engine=engine)
    (trajectory,) = episodes.trajectories
    assert (trajectory.reward, trajectory.finish_reason) == (0.125, "length")
    assert len(trajectory.token_ids) <= 600 and trajectory.loss_mask[-1], "nothing hangs behind the last token"
    exact(episodes, engine)
    cut, _ = await play(environment, None, engine=engine, max_tokens=300)
    assert len(cut.trajectories[0].token_ids) <= 300
    none, _ = await play(environment, None, prompt="more " * 200, engine=engine, max_tokens=300)
    (failure,) = none.failures
    assert "without a reply that can be trained on: the episode has" in str(failure) and "allow at most 300" in str(
        failure
    )


async def test_a_turn_that_ended_within_its_reasoning_ends_the_episode() -> None:
    episodes, _ = await play(Talk(three_turns), ["<think>hm", "x"])
    assert [each.reward for each in episodes.trajectories] == [0.0]
    assert sampled_texts(episodes) == ["<think>hm<|im_end|>"]


async def test_stop_and_max_tokens_are_of_one_call() -> None:
    async def episode(chat: Conversation, row: dict[str, Any]) -> float:
        first = await chat.reply(stop=["ll"])
        assert (first.content, first.finish_reason) == ("hell", "stop")
        chat.user("again")
        second = await chat.reply(max_tokens=2)
        assert (second.content, second.finish_reason) == ("he", "length")
        chat.user("again")
        third = await chat.reply(stop=[ord("o")])
        return float(third.content == "hello")

    episodes, engine = await play(Talk(episode), ["hello there"] * 3)
    assert episodes.trajectories[0].reward == 1.0
    assert sampled_texts(episodes) == ["hell", "he", "hello"]
    exact(episodes, engine)


async def test_what_is_sampled_at_another_temperature_is_read_and_not_trained_on() -> None:
    async def episode(chat: Conversation, row: dict[str, Any]) -> float:
        await chat.reply(temperature=0.0)
        chat.user("and you?")
        await chat.reply()
        return 1.0

    episodes, engine = await play(Talk(episode), ["greedy", "sampled"])
    assert sampled_texts(episodes) == ["sampled<|im_end|>"]
    assert [request.sampling.temperature for request in engine.requests] == [0.0, 1.0]


async def test_an_episode_that_is_not_async_is_told_so() -> None:
    class Plain(ChatEnvironment):
        def episode(self, chat: Conversation, row: dict[str, Any]) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 1.0

    episodes, _ = await play(Plain(), ["hello"])
    assert "Plain.episode is not async. Define it with `async def`" in str(episodes.failures[0])


@pytest.mark.parametrize(
    "what", ["raises", "exits", "is cancelled", "hangs", "says nothing", "the engine fails", "no number"]
)
async def test_what_fails_is_one_member(what: str) -> None:
    members = iter(range(10))

    async def episode(chat: Conversation, row: dict[str, Any]) -> Any:
        if next(members) != 1:
            await chat.reply()
            return 1.0
        if what == "raises":
            raise KeyError("a bug")
        if what == "exits":
            sys.exit(3)
        if what == "is cancelled":
            (task := asyncio.ensure_future(asyncio.sleep(60))).cancel()
            await task
        if what == "hangs":
            await chat.reply()
            await asyncio.sleep(3600)
        if what == "the engine fails":
            raise GenerationError("no token")
        return 0.0 if what == "says nothing" else "much"

    # The bound is for the one that hangs: on a machine that stands still the others may pass it as well.
    timeout_s = 5.0 if what == "hangs" else 0.0
    episodes, _ = await play(Talk(episode), ["hello"], size=3, timeout_s=timeout_s)
    assert len(episodes.trajectories) == 2 and len(episodes.failures) == 1
    says = {
        "raises": "KeyError: 'a bug' (test_chat.py, line ",
        "exits": "SystemExit: 3",
        "is cancelled": "was cancelled",
        "hangs": "took longer than 5 s",
        "says nothing": "without a reply",
        "the engine fails": "no token",
        "no number": "returned 'much'",
    }
    assert says[what] in str(episodes.failures[0])


async def test_what_is_inserted_stands_in_the_policy_s_own_turn_outside_the_loss() -> None:
    class Inserting(ChatEnvironment):
        async def episode(self, chat: Conversation, row: dict[str, Any]) -> float:
            with pytest.raises(ValueError, match="has ended, or has not begun"):
                chat.insert("!")
            await chat.reply(stop=["?"])
            chat.insert(" <b>")
            await chat.reply()
            with pytest.raises(ValueError, match="has ended, or has not begun"):
                chat.insert("!")
            chat.user("and?")
            await chat.reply(stop=["?"])
            chat.insert("&")
            chat.user("then end")  # ends the open turn first
            await chat.reply()
            return 1.0

    turns = iter(["why? oh", "so", "how? oh", "well"])
    episodes, engine = await play(Inserting(), lambda _: next(turns))
    assert sampled_texts(episodes) == ["why?", "so<|im_end|>", "how?", "well<|im_end|>"]
    text = TOKENIZER.decode(episodes.trajectories[0].token_ids.tolist())
    assert "assistant\nwhy? <b>so<|im_end|>" in text
    assert "assistant\nhow?&<|im_end|>\n<|im_start|>user\nthen end<|im_end|>" in text
    exact(episodes, engine)


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ({"role": "user", "content": 5}, "must be text"),
        ({"role": "user", "content": None}, "needs `role` and `content`"),
        ({"role": "user", "content": "\ud83d"}, "half a character"),
        ({"role": "observer", "content": "x"}, "no place for messages of these roles here: observer"),
        ({"role": "assistant", "content": "x"}, "the policy did not sample it"),
    ],
)
async def test_a_message_that_no_template_can_hold_fails_the_episode_and_does_not_end_it(added: Any, says: str) -> None:
    """Taken for the end of the conversation, each episode was trained as far as it got, with a reward of 0."""

    async def episode(chat: Conversation, row: dict[str, Any]) -> float:
        await chat.reply()
        chat.add(added)
        await chat.reply()
        return 1.0

    episodes, _ = await play(Talk(episode), ["hello", "bye"])
    (failure,) = episodes.failures
    assert says in str(failure) and not episodes.trajectories


@pytest.mark.parametrize("turns", [1, 2])
async def test_nothing_can_be_said_while_the_policy_replies(turns: int) -> None:
    """The second of two replies at once was recorded after the first, which it was not sampled after."""

    async def episode(chat: Conversation, row: dict[str, Any]) -> float:
        for _ in range(turns - 1):
            await chat.reply()
            chat.user("more")
        first = asyncio.create_task(chat.reply())
        await asyncio.sleep(0)
        for act in (lambda: chat.user("a"), lambda: chat.system("a"), lambda: chat.insert("a")):
            with pytest.raises(ValueError, match="the policy is replying"):
                act()
        with pytest.raises(ValueError, match="the policy is replying"):
            await chat.reply()
        await first
        chat.user("and now")
        await chat.reply()
        return 1.0

    episodes, engine = await play(Talk(episode), ["hello", "hm", "bye"])
    exact(episodes, engine)
    assert len(sampled_texts(episodes)) == turns + 1


async def test_one_stop_text_is_a_text_and_not_its_letters() -> None:
    async def episode(chat: Conversation, row: dict[str, Any]) -> float:
        assert (await chat.reply(stop="</go>")).content == "a / b</go>"
        with pytest.raises(ValueError, match="max_tokens must be 1 or more; got 0"):
            chat.user("more")
            await chat.reply(max_tokens=0)
        return 1.0

    episodes, _ = await play(Talk(episode), ["a / b</go> and"])
    assert episodes.trajectories[0].reward == 1.0


async def test_two_turns_in_a_row_are_a_mistake_with_a_name() -> None:
    async def episode(chat: Conversation, row: dict[str, Any]) -> float:
        await chat.reply()
        await chat.reply()
        return 1.0

    episodes, _ = await play(Talk(episode), ["hello", "x"])
    assert "add a message before the next reply" in str(episodes.failures[0])


def test_a_model_whose_template_is_unknown_is_refused_at_start(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = EnvironmentConfig(name=f"{tmp_path}/own.py:Own", args={"turns": 2})
    strange = open_chat(tokenizer("<|im_end|>", "{% for m in messages %}{{ m.content }}{% endfor %}"), str(tmp_path))
    with pytest.raises(ConfigError, match=r"has several turns, but.*model\.renderer=default"):
        make_environment(config, chat=strange)
    make_environment(config, chat=CHAT)
    for args, says in (
        ({"turn": 2}, r"Own\(turns: int = 1\)"),
        ({"turns": 2, "x": 1}, "unexpected keyword argument 'x'"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_environment(EnvironmentConfig(name=config.name, args=args))


OWN = """
from asyncrl.environments.chat import ChatEnvironment


class Own(ChatEnvironment):
    def __init__(self, turns: int = 1):
        assert turns == 2

    async def episode(self, chat, row):
        return 1.0
"""
