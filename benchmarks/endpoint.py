"""What does a call through the endpoint of `environment=openai` cost beyond the engine?

    python -m benchmarks.endpoint [--calls 2000] [--agents 32]

The engine answers at once with 64 tokens. Each conversation has one key and four calls. Milliseconds per call:

    plain        one call after another over one connection, by a client that only writes and reads bytes
    openai       the same by the `openai` package; includes the package's own work
    package      the same package with a server that answers every request with the same bytes: the package's own work
                 alone, alternating with `openai` conversation by conversation
    over         `openai` minus `package`, the median of the differences of such pairs: what a call costs beyond the
                 engine
    crowd        by `agents` plain clients at once: elapsed time over number of calls
    processor    processor time per call of `crowd`, clients and server together
    chat         processor time per call of rendering the prompt or extending the turn before, and of parsing the reply
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai

from asyncrl.environments.base import EpisodeTools
from asyncrl.environments.openai.calls import Calls
from asyncrl.environments.openai.endpoint import Endpoint
from asyncrl.rollout.worker.tokenizer import make_decode, make_encode
from asyncrl.types import Completion
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.chat import END, TEXTS, chat, tokenizer

REPLY_TOKENS = 64
CALLS = 4
"""Calls per conversation. Most of them extend a turn before."""
HINT = "That is not all. Think of the padding."
QUESTION = "Why is a batch packed? " * 8


class AtOnce:
    """An engine that answers at once. Implements what `Calls` needs of an engine."""

    def __init__(self) -> None:
        ids = tokenizer().encode((TEXTS / "data.md").read_text(), add_special_tokens=False)[:REPLY_TOKENS]
        ids[-1] = tokenizer().encode(END, add_special_tokens=False)[0]
        self.ids = np.asarray(ids, np.int32)

    async def one(self, token_ids: Any, **_: Any) -> Completion:
        return Completion(
            token_ids=self.ids,
            logprobs=np.full(REPLY_TOKENS, -0.5, np.float32),
            policy_versions=np.zeros(REPLY_TOKENS, np.int32),
            finish_reason="stop",
        )


class Plain:
    """A client that writes requests as bytes over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: str) -> None:
        self._reader, self._writer, self._place = reader, writer, place

    @classmethod
    async def to(cls, url: str) -> Plain:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port), parts.path)

    async def complete(self, key: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        head = f"POST {self._place}/chat/completions HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {key}\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answered = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not answered.startswith(b"http/1.1 200"):
            raise RuntimeError(answered.decode())
        size = int(answered.split(b"content-length:")[1].split(b"\r\n")[0])
        return json.loads(await self._reader.readexactly(size))["choices"][0]["message"]


class Server:
    """The endpoint, with conversations opened as an environment opens them."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._engine = AtOnce()
        self._tools = EpisodeTools(
            generate=None,  # type: ignore[arg-type]
            decode=make_decode(tokenizer()),
            encode=make_encode(tokenizer()),
            score=None,  # type: ignore[arg-type]
            chat=chat(),
        )

    def conversation(self) -> Calls:
        return Calls(self._tools, self._engine, CALLS)  # type: ignore[arg-type]


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    endpoint = Endpoint("policy")
    await endpoint.start()
    try:
        yield Server(endpoint)
    finally:
        await endpoint.close()


async def by(complete: Any, server: Server, conversations: int) -> list[float]:
    """Hold conversations by `complete`. Returns the seconds of each call."""
    times = []
    for number in range(conversations):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{number}: {QUESTION}"}]
        with server.endpoint.serving(server.conversation()) as key:
            for _ in range(CALLS):
                started = time.perf_counter()
                said = await complete(key, messages)
                times.append(time.perf_counter() - started)
                messages += [said, {"role": "user", "content": HINT}]
    return times


async def plain(server: Server, conversations: int) -> list[float]:
    client = await Plain.to(server.endpoint.url)
    return await by(client.complete, server, conversations)


def by_package(client: openai.AsyncOpenAI) -> Any:
    async def complete(key: str, messages: list[Any]) -> Any:
        given = client.with_options(api_key=key)
        made = await given.chat.completions.create(model="policy", messages=messages)
        return made.choices[0].message.model_dump(exclude_none=True)

    return complete


async def with_package(server: Server, conversations: int) -> dict[str, float]:
    """Return `openai`, `package` and `over`, in seconds."""
    async with (
        echoing() as url,
        openai.AsyncOpenAI(base_url=server.endpoint.url, api_key="none") as ours,
        openai.AsyncOpenAI(base_url=url, api_key="none") as echo,
    ):
        pairs: list[tuple[float, float]] = []
        for _ in range(conversations + 1):
            asked = [await by(by_package(client), server, 1) for client in (ours, echo)]
            pairs += zip(*asked, strict=True)
    pairs = pairs[CALLS:]  # the first conversation opens the connections
    return {
        "openai": statistics.median(one for one, _ in pairs),
        "package": statistics.median(other for _, other in pairs),
        "over": statistics.median(one - other for one, other in pairs),
    }


@asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """Run a server that answers every request with the same prepared bytes. Yields its base URL."""
    said = tokenizer().decode(AtOnce().ids.tolist(), skip_special_tokens=True)
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
    completion = {"id": "call_0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    body = json.dumps(completion).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:  # ends with the connection
                asked = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(asked.split(b"content-length:")[1].split(b"\r\n")[0]))
                writer.write(head + body)
        writer.close()

    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


async def measure(calls: int, agents: int) -> dict[str, float]:
    async with serving() as server:
        await plain(server, max(1, calls // CALLS // 10))
        row = {"plain": statistics.median(await plain(server, calls // CALLS)) * 1e3}
        row |= {name: took * 1e3 for name, took in (await with_package(server, max(1, calls // CALLS // 2))).items()}
        each = max(1, calls // CALLS // agents)
        started, processor = time.perf_counter(), time.process_time()
        made = sum(map(len, await asyncio.gather(*(plain(server, each) for _ in range(agents)))))
        row["crowd"] = (time.perf_counter() - started) / made * 1e3
        row["processor"] = (time.process_time() - processor) / made * 1e3
    return row | {"chat": chat_s(max(1, calls // CALLS)) * 1e3}


def chat_s(conversations: int) -> float:
    """Return the processor seconds per call of what `Calls` asks of the chat."""
    talk, reply = chat(), AtOnce().ids.tolist()
    started = time.process_time()
    for number in range(conversations):
        prompt = talk.render([{"role": "user", "content": f"{number}: {QUESTION}"}])
        for _ in range(CALLS):
            talk.parse(reply, prompt=prompt, finish_reason="stop")
            prompt = [*prompt, *reply, *talk.extend(prompt, reply, [{"role": "user", "content": HINT}])]
    return (time.process_time() - started) / conversations / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--agents", type=int, default=32)
    options = parse(parser, {"calls": 8, "agents": 2})
    row = asyncio.run(measure(options.calls, options.agents))
    times = {name: round(value, 3) for name, value in row.items()}
    answer("endpoint", {"calls": options.calls, "agents": options.agents, "ms": times}, smoke=options.smoke)


if __name__ == "__main__":
    main()
