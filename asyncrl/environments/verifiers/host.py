"""The process in which episodes of verifiers run, one per worker.

`python -m asyncrl.environments.verifiers.host SETTINGS` is internal. It reads and writes a JSON object per line:

    worker -> host:  {"id": 1, "task": {...}, "url": "...", "key": "...", "model": "..."} or {"cancel": 1}
    host -> worker:  {"ready": true} or {"refused": "..."}; then {"id": 1, "score": 0.5, "parts": {...}} or
                     {"id": 1, "error": "..."}

consumes:     requested episodes
waits for:    the next line
unblocked by: the worker writing one, or its end: the pipe is then closed, and servers and sandboxes are shut down
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from asyncrl import collector

if __name__ == "__main__":
    collector.rest()

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.episode import Episode
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.trace import Trace
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from asyncrl.errors import ConfigError
from asyncrl.storage.log_stream import take_pipes

NO_KEY = "ASYNCRL_HAS_NO_KEY"
"""An environment variable that is not set: episodes are identified by the `X-Session-ID` that verifiers sends."""
LINE_BYTES = 64 << 20
"""Limit on the bytes of a line: a task may contain an image."""


def built(settings: Mapping[str, Any]) -> vf.Env:
    """Build the environment.

    Args:
        settings: `taskset`, `harness` and `env` of the environment; see `Verifiers`.

    Raises:
        ConfigError: verifiers refuses the settings, or the environment has several agents.
    """
    if not settings["uv"]:
        SubprocessRuntime.prepare_uv_script = _with_this_interpreter  # pyright: ignore[reportAttributeAccessIssue]
    block = {key: dict(value) if isinstance(value, Mapping) else value for key, value in settings["env"].items()}
    if settings["taskset"]:
        block["taskset"] = {"id": settings["taskset"], **block.get("taskset", {})}
    agent = {"runtime": {"type": "subprocess"}, **block.get("agent", {})}
    if settings["harness"]:
        agent["harness"] = {"id": settings["harness"], **agent.get("harness", {})}
    try:
        env = load_environment(resolve_env_config(block | {"agent": agent}))
    except Exception as error:  # errors of verifiers, of pydantic, and of the taskset's own code
        raise ConfigError(f"environment.args: verifiers refuses this: {type(error).__name__}: {error}") from error
    if not isinstance(env, vf.SingleAgentEnv):
        raise ConfigError(
            f"environment.args.taskset={settings['taskset']} is an environment of several agents "
            f"({type(env).__name__}), but only one is trained here. Give a taskset for one agent"
        )
    return env


async def _with_this_interpreter(
    self: SubprocessRuntime, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
) -> list[str]:
    """Replacement of `prepare_uv_script` that creates no environment and downloads nothing."""
    data = script.encode() if isinstance(script, str) else script
    path = f"{self.scripts_dir}/{hashlib.sha256(data).hexdigest()}.py"
    if not os.path.exists(path):
        await self.write(f"{path}.{os.getpid()}", data)
        os.replace(f"{path}.{os.getpid()}", path)  # atomic, since siblings start at the same moment
    return [sys.executable, path]


class Host:
    """Runs episodes concurrently."""

    def __init__(self, env: vf.Env) -> None:
        self._env = env
        task = type(env.taskset).task_type()
        self._task, self._data = task, task.data_type()
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, lines: asyncio.StreamReader, out: int) -> None:
        try:
            async with self._env.serving():
                say(out, line({"ready": True}))
                while came := await lines.readline():
                    asked = json.loads(came)
                    if "cancel" in asked:
                        running = self._running.get(asked["cancel"])
                        if running is not None:
                            running.cancel()
                        continue
                    task = asyncio.create_task(self._answer(asked, out))
                    self._running[asked["id"]] = task
                for task in self._running.values():
                    task.cancel()
                await asyncio.gather(*self._running.values(), return_exceptions=True)
        except Exception as error:  # servers of the taskset that do not start
            say(out, line({"refused": f"{type(error).__name__}: {error}"}))
            raise

    async def _answer(self, asked: dict[str, Any], out: int) -> None:
        number = {"id": asked["id"]}
        try:
            said = line({**number, **outcome_of(await self._episode(asked))})
        # Errors of the taskset's and the harness's code, and of values they put into the metrics: each gets an answer,
        # since the worker would otherwise wait for ever.
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # by the worker, or at the end; otherwise by their code
                raise
            said = line({**number, "error": f"{type(error).__name__}: {error}"})
        finally:
            del self._running[asked["id"]]
        say(out, said)

    async def _episode(self, asked: dict[str, Any]) -> Episode:
        task = self._task(self._data.model_validate(asked["task"]), self._env.config.taskset.task)
        client = vf.EvalClientConfig(base_url=asked["url"], api_key_var=NO_KEY)

        def known(trace: Trace) -> None:
            trace.id = asked["key"]

        (slot,) = self._env.slots(task)
        return await self._env.run_slot(slot, ModelContext(model=asked["model"], client=client), on_trace=known)


def outcome_of(episode: Episode) -> dict[str, Any]:
    """Return the reward, its unweighted parts and metrics; or why there is none."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or len(episode.traces) != 1:
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "it gave no error"
        return {"error": f"the episode of verifiers failed: {last}"}
    (trace,) = episode.traces
    lacking = [name for name, reward in trace.rewards.items() if reward is None]
    if lacking or not trace.rewards:
        return {"error": f"the task gave no reward{f' ({lacking[0]})' if lacking else ''}: {trace.stop_condition}"}
    parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    parts |= {name: value for name, value in trace.metrics.items() if value is not None and name not in parts}
    return {"score": trace.reward, "parts": parts}


def line(message: dict[str, Any]) -> bytes:
    """Encode a message. Raises TypeError or ValueError if it is not JSON."""
    return json.dumps(message, default=float).encode() + b"\n"


def say(out: int, said: bytes) -> None:
    data = memoryview(said)
    while data:
        data = data[os.write(out, data) :]


async def main(settings: dict[str, Any]) -> int:
    given, out = take_pipes()
    lines = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(given, "rb", buffering=0)
    )
    try:
        env = built(settings)
        collector.wake()
    except ConfigError as error:
        say(out, line({"refused": str(error)}))
        return 2
    await Host(env).serve(lines, out)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(json.loads(sys.argv[1]))))
