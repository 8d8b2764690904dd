"""A server of the Model Context Protocol, as the documentation of the package mcp writes one."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from mcp.server import MCPServer
from mcp_types import BlobResourceContents, EmbeddedResource, ImageContent, ResourceLink, TextResourceContents

server = MCPServer("tests")


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
