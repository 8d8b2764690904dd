"""A model's tokenizer and chat template from the files in its folder, without transformers, whose import takes seconds:
for what is looked at before anything is started. What is trained on is always tokenized by the workers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from asyncrl.chat.base import (
    ChatError,
    Message,
    ToolSpec,
    no_place_for_tools,
    no_template,
    unrenderable,
    with_arguments,
)
from asyncrl.chat.hub import described_in
from asyncrl.chat.names import tells_of_tools
from asyncrl.errors import ConfigError

TOKENIZER = "tokenizer"
"""Under which name the learner announces the `tokenizer_digest` of its own."""
PROBE = " Ab 1234567, naïve 你好\n\tif x != 3:  return {'k': 0.5}"
"""A text that tokenizers of one vocabulary cut otherwise where their rules differ."""
OTHER_FILES = ("*.model", "*.tiktoken", "vocab.*", "merges.txt", "*.jinja")
"""Of a tokenizer without a `tokenizer.json`."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class LocalTokenizer:
    """The part of a Hugging Face tokenizer that prompts need (`chat.base.PromptRenderer`)."""

    def __init__(self, tokenizer: Tokenizer, templates: dict[str, str], special: dict[str, str]) -> None:
        """
        Args:
            templates: for chats, by name; prompts are written by `default`.
        """
        self._tokenizer, self.templates, self.special = tokenizer, templates, special
        self.chat_template = templates.get("default", "")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """As the template writes them, which is what the workers' renderer writes too. Raises ChatError."""
        if not self.chat_template:
            raise no_template()
        try:
            text = self.apply_chat_template(with_arguments(messages), add_generation_prompt=True, tools=tools)
        except ChatError:
            raise
        except Exception as error:  # a template is code that came with the model: whatever it raises is one bad row
            raise unrenderable("the tokenizer's chat template", error) from error
        # The template wrote the special tokens already; adding them again would double the BOS.
        return self.encode(text, add_special_tokens=False)

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        tools: Sequence[ToolSpec] = (),
    ) -> str:
        """Raises ChatError where the template leaves `tools` out; jinja2.TemplateError, or whatever else a template
        makes of messages that it was not written for."""
        template = self.templates.get("tool_use", self.chat_template) if tools else self.chat_template
        if tools and not tells_of_tools(template):
            raise no_place_for_tools()
        given = {"messages": conversation, "tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
        return _compiled(template).render(given | self.special)


def load_local_tokenizer(folder: Path) -> LocalTokenizer | None:
    """None where there is no such folder (a name on the hub), or no `tokenizer.json` in it.

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
    return LocalTokenizer(tokenizer, _chat_templates(folder, settings), special)


def own_tokenizer(model_path: str) -> LocalTokenizer | None:
    """As the model's `tokenizer.json` says; None where there is none, or it cannot be read, which those who need it
    say. One of ten megabytes takes half a second."""
    with contextlib.suppress(ConfigError, ValueError):
        folder = described_in(model_path)
        return load_local_tokenizer(folder) if folder else None
    return None


def tokenizer_digest(model_path: str, found: LocalTokenizer | None = None) -> str:
    """Of which token ids texts have and how messages are written: of copies the same. Empty where nothing is to be
    found, or it cannot be read.

    Args:
        found: `own_tokenizer`, where that was read already.
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
        raise ValueError(f"{file} is no JSON: {error}. Save the tokenizer again") from error


def _text(token: Any) -> str:
    """Of a token as it is written in `tokenizer_config.json`."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """By name. A file of its own counts before the settings."""
    alone, others = folder / "chat_template.jinja", (folder / "additional_chat_templates").glob("*.jinja")
    found = {file.stem: file.read_text() for file in others}
    if alone.is_file():
        return {**found, "default": alone.read_text()}
    template = _json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template") or ""
    if isinstance(template, list):
        return found | {str(each.get("name")): str(each["template"]) for each in template}
    return {**found, "default": str(template)}


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote; for the text it means nothing."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compiled(chat_template: str) -> Template:
    """Once for all prompts: it takes ten times as long as one of them. Raises jinja2.TemplateError."""
    return _environment().from_string(chat_template)


def _environment() -> ImmutableSandboxedEnvironment:
    """Templates come with the model: they get values and no way to the machine."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    made.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _raise(message: str) -> None:
    raise TemplateError(message)
