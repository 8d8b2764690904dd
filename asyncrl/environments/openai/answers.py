"""Builds answers to the agent: OpenAI's JSON of completions, streams and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from asyncrl.chat.base import Message, Reply
from asyncrl.environments.openai.requests import Refused


def message_of(reply: Reply, number: int, stop: Sequence[str] = ()) -> Message:
    """Return a reply as a message of the API, except that the arguments of calls stay objects here. Stop texts are left
    out, and calls that cannot be parsed stay text.

    Args:
        number: index of the turn in its episode, for unique ids of calls.
    """
    content = "".join([reply.content, *(call.raw for call in reply.tool_calls if call.error)])
    cuts = [content.index(text) for text in stop if text in content]
    message: Message = {"role": "assistant", "content": content[: min(cuts)] if cuts else content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    calls = [
        {
            # An id that the policy wrote itself (Kimi's) is kept, since its template uses it.
            "id": f"call_{number}_{place}" if call.id == f"call_{place}" else call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(reply.tool_calls)
        if not call.error
    ]
    return message | ({"tool_calls": calls} if calls else {})


def choice_of(message: Message, reply: Reply, index: int) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    said: dict[str, Any] = message | {"content": message["content"] or (None if calls else ""), "refusal": None}
    if calls:
        said["tool_calls"] = calls
    reason = "tool_calls" if calls and reply.finish_reason == "stop" else reply.finish_reason
    return {"index": index, "message": said, "logprobs": None, "finish_reason": reason}


def completion_of(
    choices: Sequence[dict[str, Any]], *, name: str, model: str, prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": list(choices),
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def stream_of(completion: dict[str, Any], *, tell_usage: bool) -> bytes:
    """Encode the completion as server-sent events: the whole message of a choice in one chunk, its end in another."""
    head = {**completion, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    chunks: list[dict[str, Any]] = []
    for choice in head.pop("choices"):
        said = {key: value for key, value in choice["message"].items() if key != "refusal"}
        if "tool_calls" in said:
            said["tool_calls"] = [{"index": place, **call} for place, call in enumerate(said["tool_calls"])]
        for delta, reason in ((said, None), ({}, choice["finish_reason"])):
            part = {"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": reason}
            chunks.append({**head, "choices": [part]})
    if tell_usage:
        chunks.append({**head, "choices": [], "usage": usage})
    return "".join([f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]).encode()


def error_of(refused: Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {
        "error": {
            "message": str(refused),
            "type": kind,
            "param": refused.param or None,
            "code": refused.code or None,
        }
    }
