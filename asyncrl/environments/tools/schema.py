"""Converts typed Python functions to tool specs, and the policy's arguments to checked calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from asyncrl.chat.base import ToolSpec
from asyncrl.errors import ConfigError

ARGS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$")
ARG = re.compile(r"^\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")
NAMED = ("properties", "$defs")
"""Keys of a schema whose values are objects by name."""
SECTION = re.compile(r"^\s*(?:Returns?|Raises|Yields?|Examples?|Notes?):")


class CallFault(Exception):
    """Arguments that the function does not accept; the message is for the policy."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function, with the model that checks its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    spec: ToolSpec

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate arguments. Raises CallFault."""
        try:
            given = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, each['loc'])) or self.name}: {each['msg']}" for each in error.errors()
            )
            raise CallFault(f"wrong arguments: {wrong}") from error
        return {name: getattr(given, name) for name in self.arguments.model_fields}


def tool_of(function: Callable[..., Any], where: str, *, method: bool = False) -> Tool:
    """Build the tool of a function.

    Args:
        where: where the function was named, for the error.
        method: whether the first parameter is the object.

    Raises:
        ConfigError: a parameter has no type, or one that cannot be described to a model.
    """
    name, said = function.__name__, f"{where}: the tool {function.__name__}"
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{said} has a type that cannot be found: {error}") from error
    fields: dict[str, Any] = {}
    described = _described(function)
    for parameter in list(inspect.signature(function).parameters.values())[int(method) :]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{said} takes {parameter}, which cannot be described to the policy. Name its parameters")
        if parameter.name not in hints:
            raise ConfigError(
                f"{said}: parameter {parameter.name} has no type. Write one, as in `{parameter.name}: str`: the policy "
                "is shown a description made from it"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (
            hints[parameter.name],
            Field(default, description=described.get(parameter.name)),
        )
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        schema = model.model_json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"{said} has a type that cannot be described to the policy: {first}. Use JSON's types"
        ) from error
    summary = _summary(function)
    if not summary:
        raise ConfigError(f"{said} has no docstring. Write a sentence about what it is for: the policy is shown it")
    spec = {"name": name, "description": summary, "parameters": _plain(schema)}
    return Tool(name, function, model, {"type": "function", "function": spec})


def tools_of_class(kind: type, where: str) -> list[Tool]:
    """Return the tools of its public methods. Raises ConfigError."""
    methods = [
        each
        for name, each in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and each.__qualname__.startswith(f"{kind.__name__}.")
    ]
    if not methods:
        raise ConfigError(f"{where}: class {kind.__name__} has no public method. Each of them is a tool")
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ConfigError(
            f"{where}: {kind.__name__} is created again for each episode, without arguments: {error}"
        ) from error
    return [tool_of(method, where, method=True) for method in methods]


def _summary(function: Callable[..., Any]) -> str:
    """The first paragraph of the function's docstring."""
    lines: list[str] = []
    for line in (inspect.getdoc(function) or "").splitlines():
        if not line.strip() or ARGS.match(line) or SECTION.match(line):
            break
        lines.append(line.strip())
    return " ".join(lines)


def _described(function: Callable[..., Any]) -> dict[str, str]:
    """Descriptions of the parameters, from `Args:` in the docstring."""
    found: dict[str, str] = {}
    inside, last = False, ""
    for line in (inspect.getdoc(function) or "").splitlines():
        if ARGS.match(line):
            inside = True
        elif SECTION.match(line) or not line.strip():
            inside = inside and not SECTION.match(line)
        elif inside and (match := ARG.match(line)):
            last = match[1]
            found[last] = match[2].strip()
        elif inside and last:
            found[last] += f" {line.strip()}"
    return found


def _plain(schema: Any) -> Any:
    """The schema without the titles that pydantic derives from names."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    # A property may be named `title`: names are not keys of the schema.
    return {key: _each(value) if key in NAMED else _plain(value) for key, value in kept.items()}


def _each(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in named.items()}
