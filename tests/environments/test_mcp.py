"""Tools of a Model Context Protocol server in a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.tools.environment import Tools
from asyncrl.errors import ConfigError
from tests.addresses import free_port
from tests.environments.talk import call, exact, play
from tests.environments.test_tools import observed

SCRIPT = Path(__file__).with_name("mcp_toolset.py")
SERVER = f"{sys.executable} {SCRIPT}"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_server_s_tools_are_called_and_its_refusals_are_told() -> None:
    tools = Tools(mcp=[SERVER], timeout_s=30.0)
    try:
        turns = [f"{call('multiply', a=6, b=7)}\n{call('refuse')}", "42"]
        episodes, engine = await play(tools, turns, columns={"answer": "42"})
        assert "42" in observed(engine) and "Error: Error executing tool refuse" in observed(engine)
        assert episodes.trajectories[0].reward == 1.0
        exact(episodes, engine)
        _, engine = await play(tools, [call("show"), "ok"])
        shown = ("first", "the page", "[image/png: demo://chart]", "[more: demo://more]", "[image: image/png]")
        assert "\n".join(shown) in observed(engine)
        tools._sources[0].timeout_s = 0.5  # pyright: ignore[reportAttributeAccessIssue]
        _, engine = await play(tools, [call("wait", seconds=600), "ok"])
        assert "took longer than 0.5 s" in observed(engine)
        tools._sources[0].timeout_s = 60.0  # pyright: ignore[reportAttributeAccessIssue]
        for name, given, said in (("die", {}, "Connection closed"), ("multiply", {"a": 6, "b": 8}, "48")):
            _, engine = await play(tools, [call(name, **given), "ok"])
            assert said in observed(engine), "the next call starts it again"
    finally:
        tools.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("code", [-32000, -32600])
async def test_an_error_of_a_tool_costs_the_server_nothing_whatever_its_code(code: int) -> None:
    """Clients use these codes for a connection that is lost: taken so, the server and all that it keeps was lost."""
    tools = Tools(mcp=[SERVER], timeout_s=60.0)
    try:
        for name, given, said in (
            ("count", {}, "\n1\n"),
            ("fail", {"code": code}, "the tool says no"),
            ("count", {}, "\n2\n"),
            ("record", {}, '{"city": "Köln"}'),
        ):
            _, engine = await play(tools, [call(name, **given), "ok"])
            assert said in observed(engine)
    finally:
        tools.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_server_that_ends_between_calls_or_answers_nothing_any_more_is_started_again() -> None:
    tools = Tools(mcp=[SERVER], timeout_s=60.0)
    source: Any = tools._sources[0]
    (server,) = source._servers

    async def lost() -> None:
        async with asyncio.timeout(120):
            while server._link is not None:
                await asyncio.sleep(0.01)

    try:
        _, engine = await play(tools, [call("leave"), "ok"])
        assert "bye" in observed(engine)
        await lost()
        _, engine = await play(tools, [call("count"), "ok"])
        assert "\n1\n" in observed(engine), "no call was waiting for the server when it ended: none has failed"
        source.timeout_s = 1.0
        _, engine = await play(tools, [call("block"), "ok"])
        assert "took longer than 1 s" in observed(engine)
        await lost()
        source.timeout_s = 60.0
        _, engine = await play(tools, [call("count"), "ok"])
        assert "\n1\n" in observed(engine)
    finally:
        tools.close()


@pytest.mark.slow
def test_a_server_that_does_not_come_up_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"did not start: [A-Za-z]+Error: "):
        Tools(mcp=[f"{sys.executable} -c pass"])


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_lost_server_that_cannot_be_started_again_fails_the_episode(tmp_path: Path) -> None:
    """The policy is told nothing: it would be trained on what it cannot help."""
    gone = tmp_path / "once.py"
    gone.write_text(f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\nimport mcp_toolset\n")
    with gone.open("a") as file:
        file.write("import pathlib\npathlib.Path(__file__).unlink()\nmcp_toolset.server.run()\n")
    tools = Tools(mcp=[f"{sys.executable} {gone}"], timeout_s=5.0)
    try:
        _, engine = await play(tools, [call("die"), "ok"])
        assert "Connection closed" in observed(engine)
        for _ in range(2):
            episodes, engine = await play(tools, [call("multiply", a=6, b=7), "42"])
            assert not episodes.trajectories and len(engine.requests) == 1
            assert "cannot be started again: environment.args.mcp: " in str(episodes.failures[0])
    finally:
        tools.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_server_behind_an_address_is_called_and_found_again_after_its_restart() -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(ConfigError, match="ConnectError"):
        Tools(mcp=[address])
    server = await _served(port)
    tools = Tools(mcp=[address], timeout_s=60.0)
    try:
        episodes, engine = await play(tools, [call("multiply", a=6, b=7), "42"], columns={"answer": "42"})
        assert "42" in observed(engine) and episodes.trajectories[0].reward == 1.0
        exact(episodes, engine)
        server.kill()
        server.wait()
        server = await _served(port)
        _, engine = await play(tools, [call("count"), "ok"])
        assert "\n1\n" in observed(engine), "the server has forgotten the session: no tool had seen the call"
        _, engine = await play(tools, [call("die"), "ok"])
        assert "Error: MCPError: " in observed(engine), "the call has run, and is not made again"
        server.wait(60)
        episodes, engine = await play(tools, [call("count"), "ok"])
        assert "cannot be started again: environment.args.mcp: " in str(episodes.failures[0]), "nobody listens"
        server = await _served(port)
        _, engine = await play(tools, [call("count"), "ok"])
        assert "\n1\n" in observed(engine)
        server.kill()
        server.wait()
        episodes, engine = await play(tools, [call("count"), "ok"])
        assert not episodes.trajectories, "the policy is told nothing of a server that was gone before the call"
    finally:
        tools.close()
        server.kill()
        server.wait()


async def _served(port: int) -> subprocess.Popen[bytes]:
    """Start the server, and wait until it answers."""
    server = subprocess.Popen([sys.executable, str(SCRIPT), str(port)], stderr=subprocess.DEVNULL)
    async with asyncio.timeout(120):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return server
