"""Parses the body of a chat completion request; unsupported requests are refused with the reason."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.chat.base import Message, ToolSpec

MOST_CHOICES = 64
"""Limit on the choices of one call; each is a separate branch."""
READ = ("messages", "tools", "n", "max_tokens", "max_completion_tokens", "stop", "temperature", "stream")
READ += ("stream_options", "model", "seed")
HARMLESS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
"""Parameters that do not affect sampling."""
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "top_p": (1, 1.0),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "top_k": (-1, 0),
    "min_p": (0, 0.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
}
"""Parameters that are accepted with these values, which have no effect."""
BIASED = ("top_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "min_p", "logit_bias")
ROLES = ("system", "developer", "user", "assistant", "tool")


class Refused(Exception):
    """An error of OpenAI's API.

    Args:
        status: HTTP status.
        code: error code for programs.
        param: parameter of the request.
        final: whether retrying is useless; clients are told so.
    """

    def __init__(self, status: int, message: str, code: str = "", param: str = "", *, final: bool = True) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.final = status, code, param, final


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One parsed request."""

    messages: list[Message]
    """Messages with text contents, and objects as arguments of calls."""
    tools: list[ToolSpec]
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    stream: bool = False
    tell_usage: bool = False
    """Whether a stream reports usage in a separate chunk."""
    key: str = ""
    """Identifies the request: the same for a retry."""


def read_call(body: Any, *, model: str, ignore: Collection[str] = (), once: str = "") -> Call:
    """Parse a request.

    Args:
        model: name of the served policy.
        ignore: parameters that are ignored, whatever their value.
        once: the request's Idempotency-Key.

    Raises:
        Refused: 400 or 404, with the reason.
    """
    if not isinstance(body, dict):
        raise Refused(400, f"the body must be a JSON object; got a {type(body).__name__}")
    given = {name: value for name, value in body.items() if name not in ignore and value is not None}
    if given.get("model", model) != model:
        raise Refused(
            404,
            f"there is no model {given['model']!r:.80}; the policy is {model!r}, which the agent is given as `model`. "
            "environment.args.ignore=[model] accepts any name",
            "model_not_found",
            "model",
        )
    for name, value in given.items():
        if name not in READ and name not in HARMLESS and value not in DEFAULTS.get(name, ()):
            raise _unsupported(name, value)
    messages = read_messages(given.get("messages"))
    options = given.get("stream_options") or {}
    return Call(
        messages=messages,
        tools=_tools(given.get("tools") or []),
        n=_number(given, "n", 1, MOST_CHOICES) or 1,
        max_tokens=_number(given, "max_completion_tokens", 1) or _number(given, "max_tokens", 1),
        stop=_stops(given.get("stop", ())),
        temperature=_temperature(given.get("temperature")),
        stream=bool(given.get("stream", False)),
        tell_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        key=digest([once, {name: given[name] for name in sorted(given) if not name.startswith("stream")}]),
    )


def digest(value: Any) -> str:
    """Digest of a JSON value; the same for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _invalid(param: str, said: str) -> Refused:
    return Refused(400, said, "invalid_value", param)


def _unsupported(name: str, value: Any) -> Refused:
    why = "it is not supported"
    if name in BIASED:
        why = "the policy is trained on samples from its own distribution, which this would change"
    elif name == "logprobs":
        why = "log-probs are recorded for training and are not returned"
    elif name in ("tool_choice", "response_format"):
        why = "the policy samples without constraints"
    said = f"{name}={json.dumps(value, default=str):.80}"
    return Refused(
        400,
        f"{said} is refused: {why}. Leave it out, or set environment.args.ignore=[{name}] to have it ignored",
        "unsupported_parameter",
        name,
    )


def _number(given: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least or (most is not None and value > most):
        bound = f"{least} or more" if most is None else f"{least} to {most}"
        raise _invalid(name, f"{name} must be a whole number of {bound}; got {value!r:.40}")
    return value


def _temperature(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise _invalid("temperature", f"temperature must be a number of 0 or more; got {value!r:.40}")
    return float(value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _invalid("stop", f"stop must be a text, or a list of texts, none empty; got {value!r:.80}")
    return tuple(stops)


def _tools(value: Any) -> list[ToolSpec]:
    for tool in value if isinstance(value, list) else [None]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name", "description", "parameters"}}'
            raise _invalid("tools", f"tools must be a list of {form}; got {tool!r:.120}")
    return [{"type": "function", "function": dict(tool["function"])} for tool in value]


def read_messages(value: Any) -> list[Message]:
    """Parse messages. Raises Refused."""
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "messages must be a list of at least one message")
    names: dict[str, str] = {}
    messages = [_message(each, place, names) for place, each in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise _invalid(
            f"messages[{len(messages) - 1}]",
            "the last message is the assistant's: it would begin the policy's turn with text that the policy did not "
            "sample. End with a message of the user or of a tool",
        )
    return messages


def _message(value: Any, place: int, names: dict[str, str]) -> Message:
    """Parse one message.

    Args:
        names: names of the functions called so far, by call id; updated.
    """
    param = f"messages[{place}]"
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        role = value.get("role") if isinstance(value, dict) else value
        raise _invalid(param, f"{param}: role must be one of {', '.join(ROLES)}; got {role!r:.40}")
    role = "system" if value["role"] == "developer" else value["role"]
    message: Message = {"role": role, "content": _text(value.get("content"), param)}
    if role == "tool":
        call = str(value.get("tool_call_id", ""))
        message |= {"tool_call_id": call, "name": str(value.get("name") or names.get(call, ""))}
    if role == "assistant" and value.get("tool_calls"):
        if not isinstance(value["tool_calls"], list):
            raise _invalid(param, f"{param}: tool_calls must be a list of calls")
        message["tool_calls"] = [_tool_call(call, param) for call in value["tool_calls"]]
        names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
    return message


def _text(content: Any, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        kinds = sorted({str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in parts})
        raise _invalid(param, f"{param}: content must be text, or parts of type text; got {', '.join(kinds)}")
    return "".join(part["text"] for part in parts)


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid(param, f"{param}: a tool call must have a function with a name")
    made = {"name": function["name"], "arguments": arguments_of(function.get("arguments", {}))}
    return {"id": str(call.get("id", "")), "type": "function", "function": made}


def arguments_of(given: Any) -> Any:
    """Return the object in a JSON text; any other text unchanged."""
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return given
    return found if isinstance(found, dict) else given


def conversation_keys(messages: Sequence[Message], tools: Sequence[ToolSpec], after: str = "") -> list[str]:
    """[M + 1] keys of the conversation before the first message and after each one, with the tools.

    White space around an assistant's message and the ids of its calls are ignored: agents that resend messages often
    trim the one and regenerate the other.

    Args:
        after: key of the conversation that the messages continue.
    """
    keys = [after or digest(list(tools))]
    for message in messages:
        said = message["content"].strip() if message["role"] == "assistant" else message["content"]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
        keys.append(digest([keys[-1], message["role"], said, calls]))
    return keys
