"""Chooses the renderer of a tokenizer: the named one, or one that is shown to produce the same ids as its template."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from asyncrl.chat.base import Message, ToolSpec
from asyncrl.chat.library import MODEL_RENDERER_MAP
from asyncrl.chat.names import AUTO, DEFAULT, candidates
from asyncrl.chat.renderer import RendererChat, make_renderer
from asyncrl.chat.turn_end import TOOL

log = logging.getLogger(__name__)

_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "look_up", "arguments": {"word": "x"}}}],
}
PROBES: tuple[tuple[list[Message], list[ToolSpec]], ...] = (
    ([{"role": "user", "content": "Hello, wörld"}], []),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}], []),
    (
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Bye\n"},
        ],
        [],
    ),
    ([{"role": "user", "content": "What is x?"}], [TOOL]),
    (
        [
            {"role": "user", "content": "What is x?"},
            _CALLED,
            {"role": "tool", "tool_call_id": "call_0", "name": "look_up", "content": "a letter"},
        ],
        [TOOL],
    ),
)
"""Conversations on which a renderer must agree with the template, token by token."""


def open_chat(
    tokenizer: Any, model_path: str, name: str = AUTO, options: Mapping[str, Any] | None = None
) -> RendererChat:
    """Open the chat of `model.path`'s tokenizer.

    With `auto`, a model of the hub that the library knows by name gets its renderer. Any other model, including one in
    a folder, gets the renderer of its family (`model_type` in config.json) that gives the same ids as the tokenizer's
    own template on all probes, or the default renderer if there is none.

    Raises:
        ConfigError: `name` cannot be used with this tokenizer, or `options` cannot be used with the renderer.
    """
    options = dict(options or {})
    if name != AUTO:
        return RendererChat(tokenizer, name, options, chosen=True)
    known = MODEL_RENDERER_MAP.get(model_path)
    if known is not None:
        return RendererChat(tokenizer, known, options, chosen=False)
    found = next((each for each in candidates(model_path) if agrees(tokenizer, each, options)), DEFAULT)
    return RendererChat(tokenizer, found, options, chosen=False)


def agrees(tokenizer: Any, name: str, options: Mapping[str, Any]) -> bool:
    """Whether this renderer gives the same ids as the tokenizer's template on all probes."""
    if not tokenizer.chat_template:
        return False
    try:
        renderer = make_renderer(tokenizer, name, options)
        for messages, tools in PROBES:
            given = {"tools": list(tools)} if tools else {}
            theirs = tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False, **given, **options
            )
            if renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True) != list(theirs):  # pyright: ignore[reportArgumentType]
                return False
    # The tokenizer lacks the markers, or the template cannot render one of the probes: no agreement is shown.
    except Exception as error:
        log.debug("renderer %s does not fit this tokenizer: %s", name, error)
        return False
    return True


def told(chat: RendererChat, name: str) -> str:
    """The message about `model.renderer` that is logged once at start."""
    if chat.name == DEFAULT and name == AUTO and not chat.why_single.startswith("the tokenizer has no"):
        return (
            "chat: using the tokenizer's own template (model.renderer=auto found no renderer that writes the same). "
            "Tool calls are read only with model.chat.tool_parser; environments of several turns are refused unless "
            "model.renderer=default is set"
        )
    return f"chat: renderer {chat.name}"
