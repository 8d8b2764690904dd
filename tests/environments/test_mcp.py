"""Tools of a Model Context Protocol server in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl.environments.tools.environment import Tools
from asyncrl.errors import ConfigError
from tests.environments.talk import call, exact, play
from tests.environments.test_tools import observed

SERVER = f"{sys.executable} {Path(__file__).with_name('mcp_toolset.py')}"


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
def test_a_server_that_does_not_come_up_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"did not start: [A-Za-z]+Error: "):
        Tools(mcp=[f"{sys.executable} -c pass"])
