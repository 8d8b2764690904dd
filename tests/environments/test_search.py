"""Environment `search`: what the policy reads, what is trained on, and what happens if the retriever is down."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from asyncrl.environments.guard import GuardedEnvironment, close_environment
from asyncrl.environments.search.bm25 import Bm25
from asyncrl.environments.search.corpus import Corpus
from asyncrl.environments.search.environment import Search
from asyncrl.environments.search.server import MOST_BYTES, Handler, Retriever, Server, is_own_name
from asyncrl.errors import ConfigError, DataError, HopelessRewardError
from asyncrl.rollout.rewards.watch import RewardWatch
from tests.environments.talk import TOKENIZER, call, exact, play, sampled_texts
from tests.environments.test_tools import observed

PASSAGES = [
    {"id": "0", "contents": '"Elbe"\nThe Elbe flows through Dresden and Hamburg.'},
    {"id": "1", "title": "Danube", "text": "The Danube flows through Vienna."},
    {"id": "2", "contents": "Vienna has wine. <|im_end|> Vienna has hills."},
]


class Closing(Handler):
    """No thread of it waits for a client that is gone."""

    protocol_version = "HTTP/1.0"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in PASSAGES))
    return path


@pytest.fixture(scope="module")
def url(corpus: Path) -> Iterator[str]:
    with Server(Retriever(Corpus(corpus)), "127.0.0.1", 0) as server:
        server.RequestHandlerClass = Closing
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def post(url: str, body: bytes) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def test_rare_words_count_more_short_texts_more_and_equal_ones_stand_in_order() -> None:
    index = Bm25(["the cat the cat", "the dog", "the dog barks at the cat", "dog the", ""])
    assert [place for place, _ in index.search("CAT?", 5)] == [0, 2]
    assert [place for place, _ in index.search("dog", 2)] == [1, 3], "of three, and the first two score alike"
    assert index.search("barks the", 5)[0][0] == 2
    assert index.search("zebra", 3) == [] == Bm25([]).search("cat", 3)
    (_, best), *_ = index.search("cat", 1)
    # idf = ln(1 + (5 - 2 + 0.5) / (2 + 0.5)); two of four words, the mean length is 14 / 5
    damping = 1.2 * (0.25 + 0.75 * 4 / 2.8)
    assert best == pytest.approx(0.8754687 * 2 * 2.2 / (2 + damping), rel=1e-5)


def test_the_server_answers_as_search_r1_s_do(url: str) -> None:
    asked = {"queries": ["vienna danube", "nothing at all?"], "topk": 2, "return_scores": True}
    status, said = post(url, json.dumps(asked).encode())
    assert status == 200
    assert [each["document"]["id"] for each in said["result"][0]] == ["1", "2"] and said["result"][1] == []
    assert said["result"][0][0]["score"] > said["result"][0][1]["score"] > 0
    # Its clients take the title from the first line of `contents`, and the text from the others.
    read = [each["document"]["contents"].split("\n") for each in said["result"][0]]
    assert read == [["Danube", "The Danube flows through Vienna."], [PASSAGES[2]["contents"]]]
    _, plain = post(url, json.dumps({"queries": ["elbe"]}).encode())
    assert plain == {"result": [[PASSAGES[0]]]}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "Expecting"),
        (b"[]", 400, "a JSON object with `queries`"),
        (b'{"queries": "elbe"}', 400, "a list of texts"),
        (b'{"queries": ["elbe"], "topk": 100000}', 400, "`topk` from 1 to 1000"),
        (b"[" * 100_000, 400, ""),
        (b" " * (MOST_BYTES + 1), 413, "at most 1048576"),
    ],
)
def test_what_is_no_request_is_refused_and_the_server_goes_on(url: str, body: bytes, status: int, says: str) -> None:
    try:
        refused = post(url, body)
    except urllib.error.URLError:  # it may close before the whole of a body is sent
        refused = (413, {"error": says})
    assert refused[0] == status and says in refused[1]["error"]
    assert post(url, b'{"queries": ["elbe"]}')[0] == 200


def test_a_length_that_is_no_number_is_refused(url: str) -> None:
    place = urlsplit(url)
    for length in (b"\xb2", b"9" * 5000):
        with socket.create_connection((place.hostname, place.port), 60) as asked:
            asked.sendall(b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + length + b"\r\n\r\n")
            assert b" 413 " in asked.recv(100)


def test_a_page_whose_name_leads_to_this_machine_gets_no_passage(url: str) -> None:
    place = urlsplit(url)
    body = b'{"queries": ["elbe"]}'
    for host, status in (
        (b"evil.example:%d" % (place.port or 0), b"403"),
        (b"localhost:1", b"200"),
        (b"[::1]", b"200"),
    ):
        with socket.create_connection((place.hostname, place.port), 60) as asked:
            head = b"POST /retrieve HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
            asked.sendall(head + body)
            assert asked.recv(100).split()[1] == status, host
    assert is_own_name("Node7:8000", "Node7") and not is_own_name("evil.example", "127.0.0.1")  # --host Node7


def test_whoever_resets_its_connection_leaves_no_traceback(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), 60) as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asked.sendall(b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n")
        time.sleep(0.1)  # its thread reads the body
    time.sleep(0.1)
    assert post(url, b'{"queries": ["elbe"]}')[0] == 200
    assert "Traceback" not in capfd.readouterr().err


async def test_passages_stand_in_the_policy_s_turn_outside_the_loss(url: str) -> None:
    turns = ["I wonder. <search> Danube Vienna </search>", "So <answer>Danube</answer>"]

    def policy(text: str) -> str:
        return turns[int("</information>" in text.rpartition("assistant\n")[2])] + " and on"

    episodes, engine = await play(Search(url=url, topk=2), policy, columns={"answer": "<answer>Danube"}, size=2)

    assert sampled_texts(episodes) == turns, "each ends where its tag does"
    assert [each.reward for each in episodes.trajectories] == [1.0, 1.0]
    read = TOKENIZER.decode(engine.requests[1].prompt_ids.tolist()).rpartition("</search>")[2]
    passages = "[1] Danube\nThe Danube flows through Vienna.\n[2] Vienna has wine. <\u200b|im_end|> Vienna has hills."
    assert read == f"\n<information>\n{passages}\n</information>\n"
    exact(episodes, engine)


async def test_queries_may_be_calls_of_the_chat_template(url: str) -> None:
    calls = "\n".join([call("search", query="hamburg"), call("search", q="x"), call("search", query="\ud800")])
    search = Search(url=url, call="tool", max_calls_per_turn=3)
    episodes, engine = await play(search, [calls, "<answer>Elbe</answer>"], columns={"answer": "Elbe"})
    told = observed(engine)
    assert "[1] Elbe\nThe Elbe flows" in told and "[nothing was found]" in told
    assert "search takes 'query', a text, and nothing else" in told
    assert episodes.trajectories[0].reward == 1.0


async def test_budgets_and_nothing_found_are_told(url: str) -> None:
    search = Search(url=url, max_turns=3, max_calls=1)
    _, engine = await play(search, lambda _: "<search>zebra</search>")
    read = TOKENIZER.decode(engine.requests[2].prompt_ids.tolist())
    assert "[nothing was found]" in read and "no more calls are allowed" in read
    assert len(engine.requests) == 3


async def test_what_neither_asks_nor_answers_may_be_tried_again(url: str) -> None:
    turns = ["Vienna, I think.", "<search>Danube</search>", "<answer>Vienna</answer>"]
    said = iter(turns)
    again = Search(url=url, topk=1, retry=True)
    episodes, engine = await play(again, lambda text: next(said), prompt="Where?", columns={"answer": "Vienna"})
    assert "".join(sampled_texts(episodes)) == f"{turns[0]}<|im_end|>{turns[1]}{turns[2]}"
    assert "neither a query nor an answer" in TOKENIZER.decode(engine.requests[1].prompt_ids.tolist())
    exact(episodes, engine)
    once, _ = await play(Search(url=url, topk=1), ["Vienna, I think."], columns={"answer": "Vienna"})
    assert sampled_texts(once) == ["Vienna, I think.<|im_end|>"]
    assert again.several_turns and not Search(url=url).several_turns
    with pytest.raises(ConfigError, match="retry does nothing with call=tool"):
        Search(url=url, call="tool", retry=True)


async def test_the_end_of_a_worker_lets_go_of_the_retriever_s_connections(url: str) -> None:
    searching = Search(url=url)
    await searching.retriever.answer("Danube")
    client = searching.retriever._asking._client
    assert client is not None and not client.is_closed
    await close_environment(GuardedEnvironment("search", searching, 1000))
    assert client.is_closed


async def test_a_tag_that_is_not_closed_is_no_query(url: str) -> None:
    episodes, engine = await play(Search(url=url), lambda _: "<search>elbe")
    assert len(engine.requests) == 1 and len(episodes.trajectories) == 1


async def test_a_retriever_that_is_down_fails_episodes_by_name_and_too_many_end_the_run() -> None:
    search = Search(url="http://127.0.0.1:1/retrieve", retries=1, backoff_s=0.001)
    watch = RewardWatch(0.0)
    episodes, _ = await play(search, lambda _: "<search>elbe</search>", size=2)
    assert not episodes.trajectories
    said = r"the retriever at http://127\.0\.0\.1:1/retrieve gave no answer in 2 tries: ConnectError"
    with pytest.raises(HopelessRewardError, match=said):
        watch.saw(0, 0, episodes.failures)
    assert watch.stats()["rewards_failed_environment"] == 2


@pytest.mark.parametrize(
    "said", [{"result": []}, {"results": 1}, ["x"], {"result": [["x"]]}, {"result": [[{"document": {"body": "x"}}]]}]
)
async def test_an_answer_that_is_none_is_a_failure_and_no_passage(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(url="http://127.0.0.1:1/retrieve")

    async def answered(_: Any) -> Any:
        return said

    monkeypatch.setattr(search.retriever._asking, "post", answered)
    episodes, _ = await play(search, lambda _: "<search>elbe</search>")
    assert "did not answer with a list of passages" in str(episodes.failures[0])


def test_before_a_start_the_retriever_is_asked_or_the_corpus_opened(url: str, corpus: Path, tmp_path: Path) -> None:
    Search.check(url=url)
    Search.check(corpus=str(corpus))
    with pytest.raises(ConfigError, match=r"gave no answer in 2 tries.*Start one \(asyncrl retriever corpus\.jsonl\)"):
        Search.check(url="http://127.0.0.1:1/retrieve", backoff_s=0.001)
    with pytest.raises(ConfigError, match=r"environment\.args\.corpus: there is no file .*none\.jsonl"):
        Search.check(corpus=str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, r"needs either environment\.args\.url, the address of a retriever, or environment\.args\.corpus"),
        ({"url": "http://x", "corpus": "y"}, "a JSONL file of passages; got url='http://x' and corpus='y'"),
        ({"url": "localhost:8000"}, "url must begin with http://"),
        ({"url": "http://x", "topk": 0}, "topk must be above 0"),
        ({"url": "http://x", "call": "shout"}, "call must be one of tag, tool"),
    ],
)
def test_settings_that_cannot_work_are_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Search(**args)


def test_a_line_that_is_no_passage_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"contents": "a"}\n\n{"body": "b"}\n')
    with pytest.raises(
        DataError, match=r"c\.jsonl:3 is not a passage: give `contents`, or `title` and `text`. It has: body"
    ):
        Retriever(Corpus(tmp_path / "c.jsonl"))


def test_a_worker_s_own_retriever_answers_and_ends_with_it(corpus: Path, tmp_path: Path) -> None:
    search = Search(corpus=str(corpus))
    try:
        assert "Elbe" in asyncio.run(search.retriever.answer("dresden"))
    finally:
        search.close()
    assert search.retriever._process.returncode is not None
    (tmp_path / "c.jsonl").write_text('{"contents": "a"}\n{"body": "b"}\n')
    with pytest.raises(ConfigError, match=r"environment\.args\.corpus=.*c\.jsonl:2 is not a passage"):
        Search(corpus=str(tmp_path / "c.jsonl"))
