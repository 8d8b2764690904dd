"""`environment=openai`: agents that use the `openai` package, and the trajectories that their calls become."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import psutil
import pytest

from asyncrl.chat.base import with_arguments
from asyncrl.environments.base import Episodes
from asyncrl.environments.openai.calls import Calls
from asyncrl.environments.openai.endpoint import Endpoint
from asyncrl.environments.openai.environment import OpenAI
from asyncrl.environments.openai.requests import Refused, read_call
from asyncrl.environments.registry import make_environment
from asyncrl.environments.together import Together
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.rewards.score import RewardScore
from asyncrl.rollout.worker.tokenizer import make_decode
from asyncrl.schema import EnvironmentConfig
from asyncrl.types import Completion, members_of
from tests.environments import agents
from tests.environments.talk import CHAT, TOKENIZER, Scripted, call, exact, play, sampled_texts
from tests.sockets import listeners

Make = Callable[..., OpenAI]


@pytest.fixture
async def agent() -> AsyncIterator[Make]:
    """An environment of an agent of `agents.py`; its endpoint is closed in the end."""
    made: list[OpenAI] = []
    agents.SEEN.clear()

    def make(name: str, **args: Any) -> OpenAI:
        made.append(OpenAI(agent=f"tests.environments.agents:{name}", **args))
        return made[-1]

    yield make
    for environment in made:
        await environment.close()


def numbered() -> Scripted:
    """Says which of its answers it gives, so that no two are alike."""
    numbers = itertools.count()
    return Scripted(lambda text: f"hello {next(numbers)}")


def recording(asked: list[int]) -> Any:
    """A `Generate` that says how many completions it was asked for."""

    async def generate(ids: Any, n: int, **_: Any) -> list[str]:
        asked.append(n)
        return [f"answer {place}" for place in range(n)]

    return generate


def prompts(engine: Scripted) -> list[str]:
    return [str(TOKENIZER.decode(request.prompt_ids.tolist())) for request in engine.requests]


def sampled_of_all(episodes: Episodes) -> list[list[str]]:
    return [sampled_texts(episodes, place) for place in range(len(episodes.trajectories))]


TOOLS: Any = SimpleNamespace(chat=CHAT, decode=make_decode(TOKENIZER))


async def test_an_agent_with_a_tool_is_one_trajectory_of_what_was_sampled(agent: Make) -> None:
    turns = ["hello" + call("add", a=2, b=3), "It is 5."]
    asked: list[list[str]] = []

    async def score(texts: list[str], row: dict[str, Any], **_: Any) -> list[RewardScore]:
        asked.append(texts)
        return [RewardScore(value=1.0) for _ in texts]

    episodes, engine = await play(agent("with_a_tool"), turns, prompt="2 + 3?", size=2, score=score)
    assert asked == [["It is 5."] * 2], "the answer that the agent gave back is what is scored"
    assert sampled_of_all(episodes) == [[f"{turns[0]}<|im_end|>", "It is 5.<|im_end|>"]] * 2
    exact(episodes, engine)
    # Token by token: an `hello` that was spelled is not made the one token that it would be if it were encoded again.
    assert TOKENIZER.convert_tokens_to_ids("hello") not in episodes.trajectories[0].token_ids.tolist()
    assert "<|im_start|>user\n<tool_response>\n5\n</tool_response>" in prompts(engine)[-1]
    first = next(each for each in agents.SEEN if each.choices[0].message.tool_calls)
    assert (first.choices[0].finish_reason, first.choices[0].message.content) == ("tool_calls", "hello")
    assert first.usage.total_tokens == len(engine.requests[0].prompt_ids) + first.usage.completion_tokens


async def test_calls_that_go_on_from_one_another_are_turns_with_rewards_of_their_own(agent: Make) -> None:
    said = [call("add", a=2, b=3), "It is 5."]
    told: list[Any] = []

    async def score(texts: list[str], row: dict[str, Any], *, turns: Any = None, **_: Any) -> list[RewardScore]:
        told.append(turns)
        return [RewardScore(value=1.0, turns=(0.25, 0.5) if turns else (0.75,)) for _ in texts]

    for name in ("with_a_tool", "earning"):  # the reward function says it, or the agent
        episodes, _ = await play(agent(name), said, size=2, score=score)
        assert [each.turn_rewards for each in episodes.trajectories] == [(0.25, 0.5)] * 2
        assert {each.reward for each in episodes.trajectories} == {1.0}
    assert told == [[said] * 2]
    episodes, _ = await play(agent("chooses"), None, engine=numbered(), score=score)
    (failure,) = episodes.failures
    assert "for 1 turns, but the environment reported 0" in str(failure)
    assert told[-1] is None, "answers side by side are no sequence"


async def test_a_sync_agent_runs_on_a_thread_and_streams_are_answered_whole(agent: Make) -> None:
    environment, before = agent("on_a_thread"), listeners([psutil.Process()])
    episodes, engine = await play(environment, ["hello", "bye"], size=3)
    (listener,) = listeners([psutil.Process()]) - before
    assert listener.on_loopback
    (text, usage), *_ = agents.SEEN
    assert text == "hello" and usage.completion_tokens == len("hello") + 1
    assert sampled_of_all(episodes) == [["hello<|im_end|>", "bye<|im_end|>"]] * 3
    exact(episodes, engine)
    assert [(each.reward, each.rewards) for each in episodes.trajectories] == [(0.5, {"turns": 2.0})] * 3


async def test_no_answer_waits_for_an_acknowledgement_of_its_head() -> None:
    """Head and body of an answer are two writes. Without TCP_NODELAY on the connection the second waits for the
    client's acknowledgement of the first, which clients delay by 40 ms."""
    endpoint = Endpoint("policy")
    await endpoint.start()
    try:
        place = urlsplit(endpoint.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: here\r\n\r\n")
        assert b"401" in await reader.readline()
        assert endpoint._server is not None
        (connection,) = endpoint._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
    finally:
        await endpoint.close()


async def test_conversations_that_do_not_extend_each_other_are_trajectories_of_one_episode(agent: Make) -> None:
    episodes, _ = await play(agent("branches"), None, engine=numbered(), size=1)
    assert [each.branch for each in episodes.trajectories] == [False, True, True, True]
    assert members_of(episodes.trajectories) == [0] and {each.reward for each in episodes.trajectories} == {1.0}
    texts = sampled_of_all(episodes)
    said = [text for each in texts for text in each]
    assert sorted(said) == [f"hello {n}<|im_end|>" for n in range(5)], "each sampled turn is trained exactly once"
    whole = [str(TOKENIZER.decode(each.token_ids.tolist())) for each in episodes.trajectories]
    left, right = (next(text for text in whole if where in text) for where in ("left", "right"))
    shared = left[: left.index("<|im_start|>user\nleft")]
    assert right.startswith(shared), "a fork goes on behind the same tokens"
    logprobs = np.concatenate([each.behavior_logprobs[each.loss_mask] for each in episodes.trajectories])
    assert len(logprobs) == sum(len(f"hello {n}") + 1 for n in range(5)) and (logprobs < 0).all()


async def test_the_same_request_has_the_same_answer(agent: Make) -> None:
    episodes, engine = await play(agent("asks_twice"), None, engine=numbered())
    assert agents.SEEN == [["hello 0", "hello 0", "hello 0", "hello 1"]]
    assert len(engine.requests) == 2 and sampled_of_all(episodes) == [["hello 0<|im_end|>"], ["hello 1<|im_end|>"]]


async def test_choices_are_branches_and_a_stop_text_is_not_told(agent: Make) -> None:
    episodes, engine = await play(agent("chooses"), ["hello"], columns={"answer": "hell"})
    (choices,) = agents.SEEN
    assert choices == [(n, "he", "stop") for n in range(3)]
    assert [request.n for request in engine.requests] == [3] and engine.requests[0].sampling.max_new_tokens == 40
    assert sampled_of_all(episodes) == [["hell"]] * 3, "what was sampled is trained on, the stop text too"
    assert {each.reward for each in episodes.trajectories} == {1.0}


@pytest.mark.parametrize("ignore", [["temperature"], []])
async def test_a_temperature_of_the_agent_s_own_is_left_out_or_read_only(agent: Make, ignore: list[str]) -> None:
    episodes, engine = await play(agent("of_a_temperature", ignore=ignore), ["first", "second"])
    obeyed = not ignore
    assert [request.sampling.temperature for request in engine.requests] == ([0.0, 1.0] if obeyed else [1.0, 1.0])
    assert sampled_texts(episodes) == (["second<|im_end|>"] if obeyed else ["first<|im_end|>", "second<|im_end|>"])


async def test_the_end_of_the_context_and_of_the_calls_are_outcomes(agent: Make) -> None:
    engine = Scripted(lambda text: "hello " * 10)
    engine.max_length = 600
    episodes, _ = await play(agent("for_ever", reward_when_over=0.125), None, engine=engine)
    (trajectory,) = episodes.trajectories
    assert (trajectory.reward, trajectory.finish_reason) == (0.125, "length")
    assert len(trajectory.token_ids) <= 600 and trajectory.loss_mask[-1]
    exact(episodes, engine)
    used, engine = await play(agent("for_ever", max_calls=3), lambda text: "hello")
    assert len(engine.requests) == 3 and len(sampled_texts(used)) == 3 and used.trajectories[0].reward == 0.0


async def test_a_turn_that_ended_within_its_reasoning_cannot_be_followed(agent: Make) -> None:
    episodes, _ = await play(agent("for_ever"), ["<think>hm", "x"])
    assert sampled_of_all(episodes) == [["<think>hm<|im_end|>"]] and episodes.trajectories[0].reward == 0.0


async def test_what_is_not_supported_is_refused_as_openai_would(agent: Make) -> None:
    await play(agent("wrong"), ["hello"])
    ((found, models),) = agents.SEEN
    assert models == ["policy"]
    expected = {
        "key": (openai.AuthenticationError, "api_key that the agent was given"),
        "model": (openai.NotFoundError, "no model 'gpt-5'"),
        "top_p": (openai.BadRequestError, r"top_p=0.9 is refused.*ignore=\[top_p\]"),
        "logprobs": (openai.BadRequestError, "not returned"),
        "tool_choice": (openai.BadRequestError, "the policy samples without constraints"),
        "unknown": (openai.BadRequestError, "beam=3 is refused: it is not supported"),
        "n": (openai.BadRequestError, "n must be a whole number of 1 to 64; got 0"),
        "last": (openai.BadRequestError, "the last message is the assistant's"),
        "image": (openai.BadRequestError, "got image_url"),
        "empty": (openai.BadRequestError, "at least one message"),
        "place": (openai.NotFoundError, "/v1/embeddings: Not Found"),
    }
    for name, (kind, says) in expected.items():
        with pytest.raises(kind, match=says) as raised:
            raise found.pop(name)
        assert raised.value.body["type"] == "invalid_request_error"  # pyright: ignore
    assert not found


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [{"role": "assistant", "content": "", "tool_calls": 5}, USER]},
        {"messages": [USER], "temperature": 10**400},
    ],
)
def test_values_that_none_would_send_are_refused_as_any(given: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=r"tool_calls must be a list|temperature must be a number"):
        read_call(given, model="policy")


async def test_lists_in_lists_without_end_are_no_json() -> None:
    deep = "[" * 100_000
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    (first, _) = read_call({"messages": [said, USER]}, model="policy").messages
    assert first["tool_calls"][0]["function"]["arguments"] == deep, "the policy's words, which an agent sends back"
    assert with_arguments([first]) == [first]
    endpoint, calls = Endpoint("policy"), Calls(TOOLS, Together(recording([])), most=1)
    await endpoint.start()
    try:
        with endpoint.serving(calls) as key:
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
                answer = await client.post(f"{endpoint.url}/chat/completions", content=deep)
        assert answer.status_code == 400 and "the body is not valid JSON" in answer.text
    finally:
        await endpoint.close()


async def test_an_agent_past_its_deadline_is_left_behind_and_not_served_any_more(agent: Make) -> None:
    environment = agent("left_behind", max_calls=1000)
    await environment._endpoint.start()  # or the deadline may pass before there is an agent
    episodes, engine = await play(environment, ["hello"], timeout_s=0.5)
    assert "took longer than 0.5 s" in str(episodes.failures[0]) and not episodes.trajectories
    served = len(engine.requests)
    async with asyncio.timeout(60):
        while not agents.SEEN:
            await asyncio.sleep(0.02)
    assert "is over" in str(agents.SEEN[0]) and len(engine.requests) == served


async def test_a_request_whose_body_comes_after_the_episode_is_over_is_refused() -> None:
    asked: list[Any] = []
    endpoint, calls = Endpoint("policy"), Calls(TOOLS, Together(recording(asked)), most=1)
    await endpoint.start()
    try:
        place = urlsplit(endpoint.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        body = b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'
        with endpoint.serving(calls) as key:
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\nexpect: 100-continue\r\n"
                + f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            )
            assert b"100" in await reader.readline(), "the key was good, and the body is waited for"
            assert await reader.readline() == b"\r\n"
        writer.write(body)
        assert b"401" in await reader.readline() and not asked
        writer.close()
    finally:
        await endpoint.close()


async def test_an_agent_that_goes_away_amid_its_request_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Any] = []
    endpoint, calls = Endpoint("policy"), Calls(TOOLS, Together(recording(asked)), most=1)
    await endpoint.start()
    try:
        place = urlsplit(endpoint.url)
        with endpoint.serving(calls) as key:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\nexpect: 100-continue\r\n"
                + f"authorization: Bearer {key}\r\ncontent-length: 10\r\n\r\n".encode()
            )
            assert b"100" in await reader.readline(), "its body is waited for"
            writer.transport.abort()
            async with asyncio.timeout(60), httpx.AsyncClient(timeout=30) as client:
                while endpoint._server is not None and endpoint._server.server_state.tasks:
                    await asyncio.sleep(0.01)
                good = await client.get(f"{endpoint.url}/models", headers={"authorization": f"Bearer {key}"})
    finally:
        await endpoint.close()
    assert good.status_code == 200 and not asked
    # asyncio's are of clients that tests before this one left behind.
    assert not [record for record in caplog.records if record.levelname == "ERROR" and record.name != "asyncio"]


async def test_what_is_given_up_before_it_was_sent_is_not_generated() -> None:
    asked: list[int] = []
    together = Together(recording(asked))
    for given_up in (2, 1):
        one, other = (asyncio.create_task(together.one(np.arange(3, dtype=np.int32))) for _ in range(2))
        await asyncio.sleep(0)  # both are waiting, to be sent in the next turn of the event loop
        for task in (one, other)[:given_up]:
            task.cancel()
        await asyncio.wait([one, other])
        assert one.cancelled() and other.cancelled() == (given_up == 2)
    assert asked == [1] and other.result() == "answer 0"


@pytest.mark.parametrize("how", ["raises", "engine", "number", "answer", "part", "list"])
async def test_what_fails_is_one_member(agent: Make, how: str) -> None:
    class Breaking(Scripted):
        async def generate(self, request: Any) -> list[Completion]:
            if "break" in TOKENIZER.decode(request.prompt_ids.tolist()):
                raise GenerationError("no token")
            return await super().generate(request)

    episodes, _ = await play(agent("fails", args={"how": how}), None, engine=Breaking(["hello"]))
    says = {
        "raises": "KeyError: 'a bug'",
        "engine": "no token",
        "number": "without a reply",
        "answer": "the agent's answer must be a text; got 3",
        "part": "the agent['cost'] returned nan",
        "list": r"returned [1]",
    }
    if how == "number":
        assert episodes.trajectories, "a text is an answer"
        return
    assert not episodes.trajectories and says[how] in str(episodes.failures[0])
    assert isinstance(episodes.failures[0], GenerationError) == (how == "engine")


async def test_an_agent_that_exits_costs_its_episode(agent: Make) -> None:
    episodes, _ = await play(agent("exits"), ["hello"])
    assert "SystemExit: 3" in str(episodes.failures[0])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "has no agent. Name a function: environment.args.agent=file.py:name"),
        ({"agent": "none.py:run"}, "environment.args.agent='none.py:run': there is no file"),
        ({"agent": "tests.environments.agents:of_nothing"}, r"It is called as of_nothing\(base_url=\.\.\., api_key"),
        ({"agent": "tests.environments.agents:fails"}, "missing a required argument: 'how'"),
        ({"agent": "tests.environments.agents:branches", "max_calls": 0}, "max_calls must be above 0"),
        ({"agent": "tests.environments.agents:branches", "ignore": "model"}, "ignore must be a list"),
        ({"turns": 3}, "unexpected keyword argument 'turns'"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_environment(EnvironmentConfig(name="openai", args=args), chat=CHAT)
