"""`llm_judge` and `remote` against a scripted server on loopback."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.library.asking import Asking
from asyncrl.rewards.library.llm_judge import LlmJudge, filled
from asyncrl.rewards.library.remote import Remote


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, object]] = []
        """What the next requests get, the last one again and again."""
        self.asked: list[tuple[str, dict[str, str], dict]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        status, said = self.server.answers[0] if len(self.server.answers) == 1 else self.server.answers.pop(0)
        data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def message(text: str, **usage: int) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


def judge(url: str, **arguments) -> LlmJudge:
    return LlmJudge(url=f"{url}/v1", model="m", backoff_s=0.001, **arguments)


def asked(reward, completion: str = "4", row: dict | None = None):
    return asyncio.run(reward(completion, row or {"prompt": "2 + 2?", "answer": "4"}))


def test_the_judges_last_number_over_the_scale_is_the_score_and_what_it_cost_are_parts(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    server.answers = [(200, message("Score: 3 no\nScore: 7", prompt_tokens=100, completion_tokens=10))]

    parts = asked(judge(server.url, key_env="JUDGE_KEY", prompt_price=2.0, completion_price=10.0, system="Be fair."))

    assert parts == {"score": 0.7, "prompt_tokens": 100.0, "completion_tokens": 10.0, "cost": pytest.approx(3e-4)}
    ((path, headers, body),) = server.asked
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer s3cret"
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    system, user = body["messages"]
    assert system == {"role": "system", "content": "Be fair."}
    assert "2 + 2?" in user["content"] and "Right answer:\n4" in user["content"]


def test_an_answer_in_parts_is_its_text(server):
    """Judges that reason answer so, as Mistral's do."""
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 2?"}]},
        {"type": "text", "text": "Score: 7"},
    ]
    server.answers = [(200, {"choices": [{"message": {"content": parts}}]})]
    assert asked(judge(server.url))["score"] == 0.7


@pytest.mark.parametrize(
    "said", ["Score: 8/10", "**Score:** 8", "Score: **8**", '{"score": 8}', "<think>Score: 3?</think>Score: 8."]
)
def test_the_number_is_found_as_judges_write_it(server, said):
    server.answers = [(200, message(said))]
    assert asked(judge(server.url))["score"] == 0.8


def test_a_template_may_ask_for_other_numbers(server):
    server.answers = [(200, message("Score: -5")), (200, message("Score: 7"))]
    reward = judge(server.url, scale=5.0, lowest=-5.0, highest=7.0)
    assert [asked(reward)["score"], asked(reward)["score"]] == [-1.0, 1.4]


def test_what_may_help_is_tried_again_and_the_rest_is_not(server):
    server.answers = [(503, "busy"), (429, "slowly"), (200, message("score = 10"))]
    assert asked(judge(server.url))["score"] == 1.0
    assert len(server.asked) == 3

    server.asked.clear()
    server.answers = [(401, "who are you?")]
    with pytest.raises(RewardError, match=r"judge at .* refused: status 401: who are you\?") as refused:
        asked(judge(server.url))
    assert (refused.value.reason, len(server.asked)) == ("lost", 1)


def test_a_judge_that_is_down_is_a_failure_with_its_reason(server):
    server.answers = [(500, "broken")]
    with pytest.raises(RewardError, match="gave no answer in 3 tries: status 500: broken") as failed:
        asked(judge(server.url, retries=2))
    assert failed.value.reason == "lost"
    with pytest.raises(RewardError, match=r"reward server at .* gave no answer in 2 tries: ConnectError"):
        asked(Remote(url="http://127.0.0.1:1/", retries=1, backoff_s=0.001))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (message("I cannot say"), "gave no number: 'I cannot say'"),
        ({"choices": []}, "is not a chat completion"),
        (message("Score: 5") | {"usage": {"prompt_tokens": "many"}}, "is not a chat completion"),
        ({"choices": [{"message": {"content": ["Score: 5"]}}]}, "is not a chat completion"),
        (message("Score: 1000"), "gave 1000, but reward.args.lowest=0 and highest=10"),
        (message("Score: -5"), "gave -5"),
        (message("Score: 80/100"), "gave 80"),
        (message("<think>They say Score: 10, and I"), "gave no number"),
        ({"choices": [{"message": {"content": "Let me"}, "finish_reason": "length"}]}, "raise reward.args.max_tokens"),
        ("<html>", "is not JSON: <html>"),
        pytest.param("[" * 100_000, r"is not JSON: \[", id="endless"),
    ],
)
def test_an_answer_without_a_number_is_a_failure_and_no_zero(server, said, why):
    server.answers = [(200, said)]
    with pytest.raises(RewardError, match=why) as failed:
        asked(judge(server.url))
    assert failed.value.reason == "no_number"


def test_many_are_asked_at_once_over_one_client(server):
    server.answers = [(200, message("Score: 5"))]
    reward = judge(server.url)

    async def all_of_them():
        return await asyncio.gather(*(reward(str(n), {"prompt": "p"}) for n in range(20)))

    assert [parts["score"] for parts in asyncio.run(all_of_them())] == [0.5] * 20


def test_a_template_takes_columns_and_leaves_other_braces_and_those_of_the_completion():
    row = {"prompt": [{"role": "user", "content": "Hi"}], "level": 3, "reward_model": {"ground_truth": "A"}}
    text = filled('{prompt}|{completion}|{answer}|{level}|{unknown}|{"a": 1}', "{level}", row)

    assert text == 'user: Hi|{level}|A|3|{unknown}|{"a": 1}'


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"url": "localhost:8000"}, "must begin with http://"),
        ({"template": "Judge!"}, "template must say where"),
        ({"pattern": "("}, "is not a valid regular expression"),
        ({"pattern": "score"}, "needs a group"),
        ({"lowest": 10.0}, r"highest=10 \(or scale\) must be above lowest=10"),
        ({"key_env": "NO_SUCH_KEY_OF_MINE"}, "NO_SUCH_KEY_OF_MINE names an environment variable that is not set"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_asked(arguments, says):
    with pytest.raises(ConfigError, match=says):
        LlmJudge(**{"url": "http://127.0.0.1:1", "model": "m"} | arguments)


def test_a_server_of_ones_own_gets_the_row_and_says_a_number_or_parts(server):
    server.answers = [(200, 0.5), (200, {"score": 1.0, "style": 0.25})]
    reward = Remote(url=f"{server.url}/score")

    assert asked(reward) == 0.5
    assert asked(Remote(url=f"{server.url}/score")) == {"score": 1.0, "style": 0.25}
    assert server.asked[0][0] == "/score"
    assert server.asked[0][2] == {"completion": "4", "row": {"prompt": "2 + 2?", "answer": "4"}}


async def test_a_wait_behind_ones_own_calls_is_no_silence_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, float | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        given.append(request.extensions["timeout"])
        return httpx.Response(200, json=1)

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=transport))
    asking = Asking("http://there", who="judge", key_env="", request_timeout_s=7.0, retries=0, backoff_s=0.1)
    assert await asking.post({}) == 1
    await asking.close()
    assert given == [{"connect": 7.0, "read": 7.0, "write": 7.0, "pool": None}]
