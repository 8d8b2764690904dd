"""Answers of servers that are wrong or missing: each error names the problem and what to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from asyncrl.engines.server.answers import ServerGoneError
from asyncrl.engines.server.vllm_link import GENERATE, VllmLink
from asyncrl.errors import ConfigError, GenerationError


@contextmanager
def answering(status: int, body: bytes = b"{}") -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def link(url: str) -> VllmLink:
    return VllmLink(url, base_url=url, key="k", timeout_s=60.0)


def streamed(url: str) -> list[object]:
    async def work() -> list[object]:
        return [chunk async for chunk in link(url).chunks(GENERATE, {}, "a")]

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (401, ConfigError, "engine.key_env=NAME"),
        (307, ConfigError, "redirects to an address"),
        (404, ConfigError, "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out"),
        (500, ServerGoneError, "status 500"),
        (400, GenerationError, "status 400"),
    ],
)
def test_an_answer_that_refuses_says_what_to_do(status, error, said):
    with answering(status) as url:
        with pytest.raises(error, match=said):
            asyncio.run(link(url).get("/server_info", "vllm_config"))
        with pytest.raises(error, match=said):
            streamed(url)


def test_one_that_is_no_vllm_or_not_there_is_gone():
    with answering(200, b"<html>") as url:
        with pytest.raises(ServerGoneError, match="gave no answer"):
            asyncio.run(link(url).facts("float32", None))
        with pytest.raises(ServerGoneError, match="broke off"):
            streamed(url)
    with pytest.raises(ServerGoneError, match="ConnectError"):
        asyncio.run(link(url).get("/version", "version"))


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b'{"vllm": 1}'])
def test_json_of_something_else_is_no_answer(body):
    with answering(200, body) as url:
        with pytest.raises(ServerGoneError, match="did not answer as vLLM does: 'version' is missing"):
            asyncio.run(link(url).get("/version", "version"))
        with pytest.raises(ServerGoneError, match="'results' is missing"):
            asyncio.run(link(url).call_workers("asyncrl_poll", ()))
    with answering(200, b"data: 7\n\n") as url, pytest.raises(ServerGoneError, match="broke off 'a': 7"):
        streamed(url)


def test_json_that_is_nested_without_end_is_no_answer():
    deep = b"[" * 100_000
    with answering(200, deep) as url, pytest.raises(ServerGoneError, match="RecursionError"):
        asyncio.run(link(url).get("/version", "version"))
    with answering(200, b"data: " + deep + b"\n\n") as url, pytest.raises(ServerGoneError, match="RecursionError"):
        streamed(url)


def test_settings_that_nobody_knows_are_refused_with_the_version():
    odd = b'{"vllm_config": {"model": 1}, "version": "0.32.0"}'
    with answering(200, odd) as url, pytest.raises(ConfigError, match=r"is not that of vLLM 0\.32 \(KeyError"):
        asyncio.run(link(url).facts("", None))


def test_a_stream_that_ends_before_its_end_is_broken():
    with answering(200, b'data: {"choices": []}\n\n') as url, pytest.raises(ServerGoneError, match="broke off"):
        streamed(url)
    with answering(200, b'data: {"choices": []}\n\ndata: [DONE]\n\n') as url:
        assert streamed(url) == [{"choices": []}]
    dead = b'data: {"error": {"message": "dead"}}\n\n'
    with answering(200, dead) as url, pytest.raises(ServerGoneError, match="dead"):
        streamed(url)
