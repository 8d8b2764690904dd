"""Call tools that hang, crash, exit, raise, leave children behind or print too much, with honest ones in between."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

from asyncrl.environments.tools.mcp_servers import Servers
from asyncrl.environments.tools.sessions import SharedSessions, ToolHost
from asyncrl.errors import EpisodeError
from tests.chaos.verdict import Verdict

TOOLS = Path(__file__).parents[1] / "environments"
HOSTILE_S, HONEST_S = 2.0, 60.0
"""Deadlines of calls, in seconds. That of honest ones is longer because a busy machine may delay them."""
STALL_S = 120.0
AT_ONCE = 4
FAILS = ("loop", "segfault", "exit", "raise")
"""Ways to misbehave for which the policy gets an error."""
ENDS = ("leave a child", "long")
"""Ways to misbehave that still give a result."""


async def misuse_functions(verdict: Verdict, count: int, seed: int) -> None:
    """Call functions and objects in processes of their own. Every fifth call, and each on an object, is honest."""
    chosen, host = random.Random(seed), ToolHost([f"{TOOLS}/toolset.py:{name}" for name in ("add", "fail", "Counter")])
    shared, slots = SharedSessions(host, AT_ONCE), asyncio.Semaphore(2 * AT_ONCE)

    async def lent(name: str, arguments: dict[str, object], timeout_s: float) -> str:
        async with shared.lent() as session:
            return (await session.call(name, arguments, timeout_s))[1]

    async def of_one_episode(steps: int) -> str:
        session = await host.open()
        try:
            said = [(await session.call("step", {"by": 2}, HONEST_S))[1] for _ in range(steps)]
        finally:
            session.kill()
        return said[-1]

    async def one(number: int, how: str) -> None:
        async with slots:
            if number % 5 == 4:
                await _judge(verdict, "adds", lent("add", {"a": number, "b": number}, HONEST_S), str(2 * number))
                await _judge(verdict, "counts", of_one_episode(3), "6")
            else:
                await _judge(verdict, how, lent("fail", {"how": how}, HOSTILE_S), "Error" if how in FAILS else "")

    try:
        await asyncio.gather(*(one(number, chosen.choice(FAILS + ENDS)) for number in range(count)))
    finally:
        host.close()


async def misuse_server(verdict: Verdict, count: int, seed: int) -> None:
    """Call the tools of one MCP server. Some calls block it and some end it, after which it is started again."""
    if not count:
        return
    chosen = random.Random(seed)
    servers = Servers([f"{sys.executable} {TOOLS / 'mcp_toolset.py'}"], HOSTILE_S)
    async with servers.episode() as call:
        try:
            for number in range(count):
                name = chosen.choice(("wait", "refuse", "die"))
                servers.timeout_s = HONEST_S
                await _judge(verdict, "multiplies", call("multiply", {"a": number, "b": 2}), str(2 * number))
                servers.timeout_s = HOSTILE_S
                await _judge(verdict, f"mcp {name}", call(name, {"seconds": 600} if name == "wait" else {}), "Error")
        finally:
            servers.close()


async def _judge(verdict: Verdict, what: str, result: Awaitable[str], begins: str) -> None:
    """Check that the result comes in time and begins with `begins`; that of an honest tool must equal it."""
    verdict.tools += 1
    verdict.kinds[f"tool: {what}"] += 1
    started = time.monotonic()
    try:
        said = await asyncio.wait_for(result, STALL_S)
    except TimeoutError:
        verdict.stalls.append(f"tool: {what}")
        return
    except EpisodeError as error:
        verdict.failed.append(f"tool: {what}: {error}")
        return
    if time.monotonic() - started > STALL_S:
        verdict.stalls.append(f"tool: {what}")
    honest = begins not in ("", "Error")
    if (said != begins) if honest else not said.startswith(begins):
        verdict.misjudged.append(f"tool: {what}: {said:.100}")
