"""Imports what we use of `renderers` without the package `openai`, which would take half a second of every worker's
start for an annotation in a client that nothing here calls.
"""

from __future__ import annotations

import sys
from types import ModuleType

_STANDS_IN = ModuleType("openai")
vars(_STANDS_IN)["AsyncOpenAI"] = object
sys.modules.setdefault("openai", _STANDS_IN)
try:
    from renderers import ParsedToolCall, Renderer, ToolCallParseStatus, create_renderer
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.configs import config_from_name
finally:
    if sys.modules["openai"] is _STANDS_IN:
        del sys.modules["openai"]  # so that a later import finds the real package

__all__ = [
    "MODEL_RENDERER_MAP",
    "ParsedToolCall",
    "Renderer",
    "ToolCallParseStatus",
    "config_from_name",
    "create_renderer",
]
