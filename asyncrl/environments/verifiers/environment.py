"""`environment.name=verifiers`: unchanged tasksets and harnesses of verifiers, with the policy as their model."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.collector import load
from asyncrl.environments.episodes import Asked
from asyncrl.environments.openai.environment import AgentEpisodes
from asyncrl.environments.verifiers.hosted import Hosted
from asyncrl.errors import ConfigError, EpisodeError

COLUMN = "verifiers"
"""Column of a row with the task's data."""


class Verifiers(AgentEpisodes):
    """Each episode is a rollout of verifiers in a process beside the worker; its model calls go to the endpoint of
    `environment=openai` and are recorded there. The task's own rewards are the reward; `reward.function` is not used.

    Args:
        taskset: name of its package.
        harness: name of its package; empty uses the taskset's own harness, or that of verifiers.
        env: further settings of verifiers, its `[env]` block: {taskset: {...}, agent: {harness: {...}, max_turns: 4}}.
            Unless it names a runtime, programs of the harness run as processes of this machine.
        path: folder with packages that are not installed.
        uv: whether programs of harnesses get their own environments from uv, which downloads them, as in verifiers;
            otherwise they run with the worker's interpreter and packages.
        max_calls, model, ignore, reward_when_over: as in `environment=openai`.
    """

    def __init__(
        self,
        taskset: str = "",
        harness: str | None = "",
        env: Mapping[str, Any] | None = None,
        path: str = "",
        uv: bool = True,
        max_calls: int = 64,
        model: str = "policy",
        ignore: Sequence[str] = ("temperature",),
        reward_when_over: float | None = 0.0,
    ) -> None:
        _check_given(taskset, env, path)
        settings = {"taskset": taskset, "harness": named(harness), "env": dict(env or {}), "uv": uv}
        self._hosted = Hosted(settings, path)
        super().__init__(
            self._solve, max_calls=max_calls, model=model, ignore=ignore, reward_when_over=reward_when_over
        )

    @staticmethod
    def check(**args: Any) -> Asked:
        """Check before a start, in a separate process. Returns the requirements on the chat. Raises ConfigError."""
        asked = Verifiers(**args).asked
        if args.get("path"):
            sys.path.insert(0, os.path.abspath(args["path"]))
        room = load("asyncrl.environments.verifiers.host")
        given = {"taskset": "", "env": {}, "uv": True} | args | {"harness": named(args.get("harness", ""))}
        room.built({key: given[key] for key in ("taskset", "harness", "env", "uv")})
        return asked

    @staticmethod
    def check_row(row: dict[str, Any]) -> None:
        """Check before a start. Raises EpisodeError for a row without a task."""
        if not isinstance(row.get(COLUMN), Mapping):
            raise EpisodeError(
                f"the row has no column {COLUMN!r} with a task. Write the file with `python -m "
                "asyncrl.environments.verifiers.rows TASKSET`"
            )

    async def _solve(self, base_url: str, api_key: str, model: str, row: dict[str, Any]) -> dict[str, float]:
        self.check_row(row)
        said = await self._hosted.run({"task": dict(row[COLUMN]), "url": base_url, "key": api_key, "model": model})
        return {**said["parts"], "score": said["score"]}

    async def close(self) -> None:
        await self._hosted.close()
        await super().close()


def named(harness: str | None) -> str:
    """Name of the harness. `null` is verifiers' chat harness; on a command line, or in YAML, it is read as None."""
    return "null" if harness is None else harness


def _check_given(taskset: str, env: Mapping[str, Any] | None, path: str) -> None:
    """Raises ConfigError for a missing package, taskset or folder."""
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError("environment.name=verifiers needs verifiers: pip install 'asyncrl[verifiers]'")
    if not taskset and not dict(env or {}).get("taskset"):
        raise ConfigError("environment.name=verifiers has no taskset. Name a package: environment.args.taskset=NAME")
    if path and not os.path.isdir(path):
        raise ConfigError(f"environment.args.path={path} is not a folder")
