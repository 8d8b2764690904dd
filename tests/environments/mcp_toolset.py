"""A server of the Model Context Protocol, as the documentation of the package mcp writes one."""

from __future__ import annotations

import asyncio
import os

from mcp.server import MCPServer

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


if __name__ == "__main__":
    server.run()
