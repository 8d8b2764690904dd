"""Implements `Chat` with the `renderers` library: hand-written, deterministic renderers of model families, and the
default renderer, which uses the tokenizer's chat template."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from asyncrl.chat.base import (
    ChatError,
    Message,
    Reply,
    ToolCall,
    ToolSpec,
    TurnOverError,
    no_place_for_tools,
    no_template,
    unrenderable,
    with_arguments,
)
from asyncrl.chat.library import ParsedToolCall, Renderer, ToolCallParseStatus, config_from_name, create_renderer
from asyncrl.chat.names import DEFAULT, Abilities, tells_of_tools
from asyncrl.chat.remembering import Remembering
from asyncrl.chat.seam import Seam
from asyncrl.chat.supervised import ASSISTANT, Ends, Supervised, by_renderer, by_template
from asyncrl.chat.template import extension_text, markers, special_tokens, without_parsers
from asyncrl.chat.turn_end import TurnEnd, turn_end, without_stop_text
from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)

KEEPS_REASONING = "all"
"""Earlier turns keep everything, because all of it was sampled and is trained on."""


BREAK = "\u200b"
"""Zero-width space, inserted after the first character of a marker: invisible, but the text is no marker any more."""


PLAIN_QUESTION: Message = {"role": "user", "content": "?"}
"""Follows every turn that anything can follow."""


class RendererChat:
    """Implements `chat.base.Chat`.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chosen: whether the user named the renderer; then the template is trusted for extensions.
        options: of the renderer, or of the chat template with the default renderer.
    """

    def __init__(self, tokenizer: Any, name: str, options: Mapping[str, Any], *, chosen: bool) -> None:
        self._tokenizer = tokenizer
        self.seam = Seam(tokenizer)
        self._template_options = without_parsers(options)
        self._renderer: Any = make_renderer(Remembering(tokenizer), name, options)
        self.name = name
        self._abilities = Abilities(
            name=name,
            template=str(tokenizer.chat_template or ""),
            chosen=chosen,
            parser=bool(options.get("tool_parser")),
        )
        added = markers(tokenizer)
        end = turn_end(tokenizer, added, self._template_options) if name == DEFAULT else TurnEnd()
        self.stop_token_ids = tuple(dict.fromkeys((*self._renderer.get_stop_token_ids(), *end.token_ids)))
        self.stop_texts = (end.text,) if end.text else ()
        self._markers = sorted((token for token in added if not token.isalnum() and len(token) > 1), key=len)
        self._rendered: tuple[str, list[int]] = "", []
        """The last rendered messages and tools (their repr) and their ids: all members of a group ask for the same."""

    @property
    def end_texts(self) -> tuple[str, ...]:
        """Ends of a turn that decoding does not leave out with the special tokens."""
        special = special_tokens(self._tokenizer)
        plain = (self.decode([token]) for token in self.stop_token_ids if token not in special)
        return (*self.stop_texts, *plain)

    @property
    def why_single(self) -> str:
        return self._abilities.why_single

    def why_no_calls(self, *, told: bool) -> str:
        return self._abilities.why_no_calls(told=told)

    @property
    def special_ids(self) -> Collection[int]:
        return {*special_tokens(self._tokenizer), *self.stop_token_ids}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        self._refuse(tools)
        opening = repr((messages, tools))
        if opening == self._rendered[0]:
            return list(self._rendered[1])
        try:
            ids = self._renderer.render_ids(
                with_arguments(messages), tools=list(tools) or None, add_generation_prompt=True
            )
        # A template is code that came with the model, and a renderer one for messages of its family: whatever they
        # raise is one list of messages that cannot be rendered.
        except Exception as error:
            what = "the tokenizer's chat template" if self.name == DEFAULT else f"renderer {self.name}"
            raise unrenderable(what, error) from error
        self._rendered = opening, list(ids)
        return ids

    def supervise(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, learned: Sequence[bool]
    ) -> Supervised:
        """Render a whole conversation, and mark the tokens that the policy would have sampled.

        Args:
            learned: for each message, whether it is trained on; false for all but the assistant's messages.

        Raises:
            ChatError: the conversation cannot be rendered, or the tokens that would be sampled cannot be determined.
        """
        self._refuse(tools)
        messages = [self._without_end(each) for each in messages]
        try:
            if self.name == DEFAULT:
                ends = Ends(tokens=[self.decode([each]) for each in self._turn_ends()], texts=self.stop_texts)
                return by_template(self._tokenizer, self.seam, messages, tools, learned, self._template_options, ends)
            return by_renderer(self._renderer, messages, tools, learned)
        except ChatError:
            raise
        except Exception as error:  # as in `render`
            what = "the tokenizer's chat template" if self.name == DEFAULT else f"renderer {self.name}"
            raise unrenderable(what, error) from error

    def _without_end(self, message: Message) -> Message:
        """Leave out the end of the turn that an assistant's text already has: the template writes one."""
        text, content = message.get("content"), message.get("content")
        if message.get("role") != ASSISTANT or not isinstance(content, str):
            return message
        ends = [*(self.decode([token]) for token in self._turn_ends()), *self.stop_texts]
        for end in filter(None, ends):
            while content.rstrip().endswith(end):
                content = content.rstrip().removesuffix(end)
        return message if content == text else {**message, "content": content}

    def parse(
        self, completion: Sequence[int], *, prompt: Sequence[int], tools: Sequence[ToolSpec] = (), finish_reason: str
    ) -> Reply:
        if self.name == DEFAULT and {int(token) for token in completion[-1:]} & {*self.stop_token_ids}:
            completion = completion[:-1]  # the library knows the EOS only, and takes another end for text
        try:
            parsed = self._renderer.parse_response(
                _plain_ids(completion), tools=list(tools) or None, prompt_ids=_plain_ids(prompt)
            )
        # The completion was sampled and may be any ids at all. A parser that fails on them has parsed no call.
        except Exception as error:
            log.debug("renderer %s could not parse a turn: %s", self.name, error)
            content = without_stop_text(self._plain(completion), self.stop_texts)
            return Reply(content=content, finish_reason=finish_reason)
        calls = tuple(_call(place, call) for place, call in enumerate(parsed.tool_calls))
        content = without_stop_text(parsed.content, self.stop_texts) if isinstance(parsed.content, str) else ""
        reasoning = parsed.reasoning_content or ""
        return Reply(content=content, reasoning=reasoning, tool_calls=calls, finish_reason=finish_reason)

    def spell(self, text: str) -> str:
        for marker in self._markers:
            if marker in text:
                text = text.replace(marker, f"{marker[0]}{BREAK}{marker[1:]}")
        return text

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        if any(message.get("role") == "assistant" for message in messages):
            raise ChatError("an assistant's message cannot follow a sampled turn: the policy did not sample it")
        if self.why_single:
            raise ChatError(self.why_single)
        if self.name == DEFAULT:
            return self._extend_by_template(completion, messages, tools)
        given = _plain_ids(prompt), _plain_ids(completion)
        try:
            return self._bridged(*given, messages, tools)
        except TurnOverError:
            raise
        except ChatError as error:
            try:
                self._bridged(*given, [PLAIN_QUESTION], tools)
            except ChatError:
                raise TurnOverError(
                    f"renderer {self.name} cannot add messages to this turn: it ended within its reasoning, or no "
                    f"message of the user may follow it ({error})"
                ) from error
            raise

    def _bridged(
        self, prompt: list[int], completion: list[int], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int]:
        """Raises ChatError if the library cannot, or TurnOverError if it would change what was sampled."""
        before = prompt + completion
        try:
            bridge = self._renderer.bridge_to_next_turn(
                prompt, completion, with_arguments(messages), tools=list(tools) or None
            )
        except Exception as error:  # as in `render`
            raise ChatError(f"renderer {self.name} failed: {type(error).__name__}: {error}") from error
        if bridge is None:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ChatError(f"renderer {self.name} has no place for messages of these roles here: {roles}")
        if bridge.token_ids[: len(before)] != before:
            raise TurnOverError(f"renderer {self.name} would change tokens that were sampled")
        return bridge.token_ids[len(before) :]

    def _extend_by_template(
        self, completion: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int]:
        text = extension_text(self._tokenizer, messages, tools, self._template_options)
        last = int(completion[-1]) if len(completion) else None
        end = str(self._tokenizer.decode([last])) if last in self._ends() else ""
        # The template writes the end of the turn; if the policy sampled it, it must not be added again.
        written = "" if end else self._ends_in_text(completion)
        if written and text.lstrip().startswith(written):
            return self.seam.encode(text.lstrip().removeprefix(written), behind=written)
        before, there, after = text.partition(end) if end else (text, "", "")
        ids = self.encode(end + after, add_special_tokens=False) if there and not before.strip() else []
        return ids[1:] if ids and ids[0] == last else self.seam.encode(text, behind=end)

    def _refuse(self, tools: Sequence[ToolSpec]) -> None:
        """Raises ChatError for messages or tools that the template cannot render."""
        template = self._tokenizer.chat_template
        if self.name == DEFAULT and not template:
            raise no_template()
        if self.name == DEFAULT and tools and not tells_of_tools(str(template)):
            raise no_place_for_tools()

    def ends_turn(self, completion: Sequence[int]) -> bool:
        return bool(
            {int(token) for token in completion[-1:]} & {*self.stop_token_ids} or self._ends_in_text(completion)
        )

    def _ends_in_text(self, completion: Sequence[int]) -> str:
        """The stop text that sampled tokens end with; empty if they end with none."""
        if not self.stop_texts:
            return ""
        said = self.seam.decode([int(token) for token in completion], special=True).rstrip()
        return next((text for text in self.stop_texts if said.endswith(text)), "")

    def _turn_ends(self) -> set[int]:
        eos = self._tokenizer.eos_token_id
        return {*self.stop_token_ids, *([] if eos is None else [int(eos)])}

    def _ends(self) -> set[int]:
        return {*self.stop_token_ids, *special_tokens(self._tokenizer)}

    def _plain(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))


def make_renderer(tokenizer: Any, name: str, options: Mapping[str, Any]) -> Renderer:
    """Create the library's renderer, set to keep earlier reasoning if it has that option.

    Raises:
        ConfigError: the renderer does not have an option, or the tokenizer lacks its markers.
    """
    given = dict(options)
    if name != DEFAULT:
        given.setdefault("thinking_retention", KEEPS_REASONING)
    kind: Any = type(config_from_name(name))
    try:
        config = kind(**given)
    except ValidationError as error:
        if "thinking_retention" not in options and name != DEFAULT:
            # One of the template's own switches already says what is kept.
            return make_renderer(tokenizer, name, given | {"thinking_retention": None})
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        known = ", ".join(sorted(kind.model_fields)) if name != DEFAULT else "any of its template"
        raise ConfigError(
            f"renderer {name} does not accept this model.chat: {wrong}. Its options are: {known}"
        ) from error
    try:
        return create_renderer(tokenizer, config)
    # Each family looks for its markers in its own way: assertions, KeyError, ValueError, TypeError.
    except Exception as error:
        raise ConfigError(
            f"model.renderer={name} cannot be used with this tokenizer: {type(error).__name__}: {error}. Set the "
            "renderer of the model that it comes from, or model.renderer=default"
        ) from error


def _plain_ids(ids: Sequence[int] | NDArray[np.int32]) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def _call(place: int, call: ParsedToolCall) -> ToolCall:
    name, arguments, error = call.name or "", call.arguments, ""
    if call.status != ToolCallParseStatus.OK:
        error = str(call.status.value).replace("_", " ")
    elif not isinstance(arguments, dict):
        error = "the arguments are not a JSON object"
    return ToolCall(
        id=call.id or f"call_{place}",
        name=name,
        arguments=arguments if isinstance(arguments, dict) else {},
        error=error,
        raw=call.raw,
    )
