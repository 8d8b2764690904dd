"""`environment.name=tools`: the policy calls functions and reads their results, until it answers without a call."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.environments.late import late_import
from asyncrl.environments.tools.calling import Budget, Calling, Source, check_positive
from asyncrl.environments.tools.sessions import Functions
from asyncrl.environments.tools.styles import Native
from asyncrl.errors import ConfigError


class Tools(Calling):
    """Scored by `reward.function`, which gets the last reply.

    Args:
        functions: `file.py:name` or `package.module:name` of typed functions, or of classes, whose public methods are
            tools and which have one object per episode.
        mcp: commands that start servers of the Model Context Protocol, which talk through their standard streams, or
            addresses of such servers.
        max_turns, max_calls, max_calls_per_turn, max_result: see `Budget`.
        timeout_s: limit of one call; past it its process is ended, and the policy is told.
        processes: number of processes in which stateless functions run concurrently.
        tell: whether the functions are described to the policy at the start.
        system: system message at the front.
    """

    def __init__(
        self,
        functions: Sequence[str] = (),
        mcp: Sequence[str] = (),
        max_turns: int = 8,
        max_calls: int = 32,
        max_calls_per_turn: int = 8,
        timeout_s: float = 10.0,
        processes: int = 4,
        tell: bool = True,
        system: str = "",
        max_result: int = 8000,
    ) -> None:
        budget = Budget(
            max_turns=max_turns, max_calls=max_calls, max_calls_per_turn=max_calls_per_turn, max_result=max_result
        )
        check_positive(timeout_s=timeout_s, processes=processes)
        check_lists(functions, mcp)
        sources: list[Source] = []
        try:
            if functions:
                sources.append(Functions(functions, processes, timeout_s))
            if mcp:
                needs = "environment.args.mcp needs the package mcp"
                sources.append(late_import("tools.mcp_servers", needs, "agents").Servers(mcp, timeout_s))
        except BaseException:
            for source in sources:
                source.close()
            raise
        super().__init__(sources, style=Native(), budget=budget, tell=tell, system=system)


def check_lists(functions: Sequence[str], mcp: Sequence[str]) -> None:
    """Raises ConfigError for settings without tools, or of a wrong type."""
    if not functions and not mcp:
        raise ConfigError(
            "environment.name=tools has no tools. Name functions, environment.args.functions=[file.py:name], or "
            "servers, environment.args.mcp=[COMMAND or http://...]"
        )
    for key, value in (("functions", functions), ("mcp", mcp)):
        if isinstance(value, str) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"environment.args.{key} must be a list: environment.args.{key}=[...]; got {value!r}")
