"""Agents as users write them, with the `openai` package. Tests name them as environment.args.agent."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
SEEN: list[Any] = []
"""Values that agents leave for the test to check."""


async def with_a_tool(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> str:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "system", "content": "Use add."}, {"role": "user", "content": row["prompt"]}]
    while True:
        completion = await client.chat.completions.create(model=model, messages=messages, tools=[ADD])
        message = completion.choices[0].message
        SEEN.append(completion)
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        call: Any
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})


async def earning(**given: Any) -> dict[str, Any]:
    await with_a_tool(**given)
    return {"score": 1.0, "turns": [0.25, 0.5]}


def on_a_thread(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> dict[str, float]:
    client = OpenAI(base_url=base_url, api_key=api_key)
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}]}]
    for _ in range(2):
        stream = client.chat.completions.create(
            model=model, messages=history, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        SEEN.append((text, chunks[-1].usage))
        history += [{"role": "assistant", "content": f" {text}\n"}, {"role": "user", "content": "more"}]
    return {"score": 0.5, "turns": 2.0}


async def branches(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Make three requests at once, and continue one of them in two ways."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)

    async def said(*messages: Any) -> str:
        completion = await client.chat.completions.create(model=model, messages=list(messages))
        return completion.choices[0].message.content or ""

    openings: list[Any] = [{"role": "user", "content": f"part {n}"} for n in range(3)]
    first, *_ = await asyncio.gather(*(said(opening) for opening in openings))
    so_far: list[Any] = [openings[0], {"role": "assistant", "content": first}]
    await said(*so_far, {"role": "user", "content": "left"})
    await said(*so_far, {"role": "user", "content": "right"})
    return 1.0


async def asks_twice(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    ask: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    create = client.chat.completions.create
    once, again = await asyncio.gather(create(**ask), create(**ask))
    later, other = await create(**ask), await create(**ask, seed=1)
    SEEN.append([each.choices[0].message.content for each in (once, again, later, other)])
    return 1.0


async def chooses(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    completion = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], n=3, stop=["ll"], max_tokens=40
    )
    SEEN.append([(choice.index, choice.message.content, choice.finish_reason) for choice in completion.choices])


async def of_a_temperature(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    ask: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    first = await client.chat.completions.create(**ask, temperature=0.0)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    ask["messages"] += [said, {"role": "user", "content": "and you?"}]
    await client.chat.completions.create(**ask)
    return 1.0


async def for_ever(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    while True:
        completion = await client.chat.completions.create(model=model, messages=messages)
        content = completion.choices[0].message.content
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "more " * 20}]


async def wrong(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Make every kind of request that is refused, and leave the results by name."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    ask: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    await client.chat.completions.create(**ask)
    strange = AsyncOpenAI(base_url=base_url, api_key="another", max_retries=0)
    end = {"role": "assistant", "content": "x"}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    tries: dict[str, Any] = {
        "key": strange.chat.completions.create(**ask),
        "model": client.chat.completions.create(**{**ask, "model": "gpt-5"}),
        "top_p": client.chat.completions.create(**ask, top_p=0.9),
        "logprobs": client.chat.completions.create(**ask, logprobs=True),
        "tool_choice": client.chat.completions.create(**ask, tool_choice="required"),
        "unknown": client.chat.completions.create(**ask, extra_body={"beam": 3}),
        "n": client.chat.completions.create(**ask, n=0),
        "last": client.chat.completions.create(**{**ask, "messages": [*ask["messages"], end]}),
        "image": client.chat.completions.create(**{**ask, "messages": [image]}),
        "empty": client.chat.completions.create(**{**ask, "messages": []}),
        "place": client.embeddings.create(model=model, input="x"),
    }
    found: dict[str, Any] = {}
    for name, attempt in tries.items():
        try:
            found[name] = await attempt
        except openai.APIStatusError as error:
            found[name] = error
    SEEN.append((found, [each.id async for each in await client.models.list()]))
    return 1.0


def left_behind(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Make requests until they are refused."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    for seed in range(1000):
        try:
            client.chat.completions.create(model=model, messages=messages, seed=seed)
        except openai.AuthenticationError as error:
            SEEN.append(error)
            break
        time.sleep(0.05)
    return 1.0


async def fails(base_url: str, api_key: str, model: str, row: dict[str, Any], how: str) -> Any:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
    if how == "raises":
        raise KeyError("a bug")
    if how == "engine":
        await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "break"}])
    return {"number": "much", "answer": {"answer": 3}, "part": {"answer": "4", "cost": math.nan}, "list": [1]}[how]


def exits(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
    raise SystemExit(3)


def of_nothing() -> None:
    """Has none of the arguments that agents are given."""
