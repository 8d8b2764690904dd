"""Loads a model's tokenizer and chat template from its folder without transformers, whose import takes seconds.
Used for checks before a run starts. Training data is always tokenized by the workers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from asyncrl.chat.base import (
    Message,
    ToolSpec,
    no_place_for_tools,
    no_template,
    unrenderable,
    with_arguments,
)
from asyncrl.chat.hub import described_in
from asyncrl.chat.names import tells_of_tools
from asyncrl.chat.template import without_parsers
from asyncrl.chat.turn_end import turn_end
from asyncrl.errors import ConfigError

TOKENIZER = "tokenizer"
"""The name under which the learner announces its `tokenizer_digest`."""
PROBE = " Ab 1234567, naïve 你好\n\tif x != 3:  return {'k': 0.5}"
"""A text that tokenizers with the same vocabulary but different rules split differently."""
OTHER_FILES = ("*.model", "*.tiktoken", "vocab.*", "merges.txt", "*.jinja")
"""Files of a tokenizer that has no `tokenizer.json`."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class LocalTokenizer:
    """The part of a Hugging Face tokenizer that prompts need (`chat.base.PromptRenderer`)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: dict[str, str],
        special: dict[str, str],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            templates: chat templates by name; prompts are rendered with `default`.
            options: of the chat template, as `model.chat`.
        """
        self._options = without_parsers(options or {})
        self._tokenizer, self.templates, self.special = tokenizer, templates, special
        self.chat_template = templates.get("default", "")

    @property
    def special_ids(self) -> Collection[int]:
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {at for at, token in added if token.special or str(token) in self.special.values()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def stops(self, options: Mapping[str, Any]) -> tuple[set[int], tuple[str, ...]]:
        """Return the tokens and texts that end a turn: the EOS, and what the chat template ends turns with.

        Args:
            options: of the chat template.
        """
        named = {token: self._tokenizer.token_to_id(token) for token in self.special.values()}
        markers = {str(token): at for at, token in self._tokenizer.get_added_tokens_decoder().items()}
        known = {token: at for token, at in (named | markers).items() if at is not None}
        end = turn_end(self, known, options)
        eos = known.get(self.special.get("eos_token", ""))
        return {*end.token_ids, *([] if eos is None else [eos])}, (end.text,) if end.text else ()

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Render with the chat template, as the workers' renderer does. Raises ChatError."""
        if not self.chat_template:
            raise no_template()
        if tools and not tells_of_tools(self._template_for(tools)):
            raise no_place_for_tools()
        try:
            text = self.apply_chat_template(
                with_arguments(messages), add_generation_prompt=True, tools=tools, **self._options
            )
        except Exception as error:  # a template is code that came with the model: whatever it raises is one bad row
            raise unrenderable("the tokenizer's chat template", error) from error
        # The template wrote the special tokens already; adding them again would double the BOS.
        return self.encode(text, add_special_tokens=False)

    def _template_for(self, tools: Sequence[ToolSpec]) -> str:
        return self.templates.get("tool_use", self.chat_template) if tools else self.chat_template

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        tools: Sequence[ToolSpec] = (),
        **options: Any,
    ) -> str:
        """Raises jinja2.TemplateError, or any other exception that the template causes on messages it was not written
        for."""
        template = self._template_for(tools)
        given = {"messages": conversation, "tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
        return _compiled(template).render(given | self.special | options)


def load_local_tokenizer(folder: Path, options: Mapping[str, Any] | None = None) -> LocalTokenizer | None:
    """Return None if the folder does not exist (a name on the hub) or has no `tokenizer.json`.

    Args:
        options: of the chat template, as `model.chat`.

    Raises:
        ValueError: one of the files cannot be read.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} cannot be read: {error}. Save the tokenizer again") from error
    tokenizer.no_truncation()
    settings = _json(folder / "tokenizer_config.json")
    special = {name: _text(settings[name]) for name in SPECIAL if settings.get(name)}
    return LocalTokenizer(tokenizer, _chat_templates(folder, settings), special, options)


def own_tokenizer(model_path: str) -> LocalTokenizer | None:
    """The tokenizer from the model's `tokenizer.json`; None if there is none or it cannot be read, which is reported
    where it is needed. Loading a file of 10 MB takes half a second."""
    with contextlib.suppress(ConfigError, ValueError):
        folder = described_in(model_path)
        return load_local_tokenizer(folder) if folder else None
    return None


def tokenizer_digest(model_path: str, found: LocalTokenizer | None = None) -> str:
    """Digest of the token ids of texts and of how messages are rendered; copies of a tokenizer have the same digest.
    Empty if no tokenizer is found or it cannot be read.

    Args:
        found: the result of `own_tokenizer`, if already loaded.
    """
    try:
        folder = described_in(model_path)
        found = found or (load_local_tokenizer(folder) if folder else None)
    except (ConfigError, ValueError):
        return ""
    if folder is None:
        return ""
    if found is None:
        files = sorted(file for ending in OTHER_FILES for file in folder.glob(ending))
        told: Any = [[file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in files]
    else:
        writes = {name: token for name, token in found.special.items() if name != "pad_token"}
        told = [sorted(found.vocabulary().items()), found.encode(PROBE), sorted(found.templates.items()), writes]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest() if told else ""


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}. Save the tokenizer again") from error


def _text(token: Any) -> str:
    """The text of a token in `tokenizer_config.json`."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. A template in a file of its own takes precedence over the one in the settings."""
    alone, others = folder / "chat_template.jinja", (folder / "additional_chat_templates").glob("*.jinja")
    found = {file.stem: file.read_text() for file in others}
    if alone.is_file():
        return {**found, "default": alone.read_text()}
    template = _json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template") or ""
    if isinstance(template, list):
        return found | {str(each.get("name")): str(each["template"]) for each in template}
    return {**found, "default": str(template)}


class _Generation(Extension):
    """`{% generation %}` marks the model's output; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compiled(chat_template: str) -> Template:
    """Compiled once for all prompts: that takes ten times as long as rendering one. Raises jinja2.TemplateError."""
    return _environment().from_string(chat_template)


def _environment() -> ImmutableSandboxedEnvironment:
    """Templates come with the model, so they run in a sandbox without access to the machine."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    made.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _raise(message: str) -> None:
    raise TemplateError(message)
