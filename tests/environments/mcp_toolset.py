"""A server of the Model Context Protocol, as the documentation of the package mcp writes one."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from mcp import MCPError
from mcp.server import MCPServer
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextResourceContents,
)

server = MCPServer("tests")
COUNTED: list[int] = []


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
async def leave() -> str:
    """Answer, and end the server."""
    asyncio.get_running_loop().call_later(0.2, os._exit, 0)
    return "bye"


@server.tool()
async def block() -> str:
    """Answer nothing from now on, whoever asks."""
    time.sleep(3600)
    return "never"


@server.tool()
def count() -> int:
    """Count the calls of this process."""
    COUNTED.append(1)
    return len(COUNTED)


@server.tool()
def fail(code: int) -> str:
    """Fail with an error of the protocol."""
    raise MCPError(code, "the tool says no")


@server.tool()
def record() -> CallToolResult:
    """Answer in structured content alone."""
    return CallToolResult(content=[], structured_content={"city": "Köln"})


@server.tool()
def refuse() -> str:
    """Refuse."""
    raise ValueError("never")


@server.tool()
def show() -> list[Any]:
    """Answer in all kinds of content."""
    page = TextResourceContents(uri="demo://page", text="the page")
    chart = BlobResourceContents(uri="demo://chart", mime_type="image/png", blob="AA==")
    return [
        "first",
        EmbeddedResource(type="resource", resource=page),
        EmbeddedResource(type="resource", resource=chart),
        ResourceLink(type="resource_link", name="more", uri="demo://more"),
        ImageContent(type="image", data="AA==", mime_type="image/png"),
    ]


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
