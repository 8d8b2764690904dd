"""`environment.name=openai`: runs an unchanged agent written against OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from asyncrl.environments.base import EpisodeTools
from asyncrl.environments.episodes import EpisodeEnvironment, EpisodeOver
from asyncrl.environments.late import late_import
from asyncrl.environments.openai.agent import SETTING, Agent, find_agent, run_agent
from asyncrl.environments.openai.calls import Calls
from asyncrl.environments.together import Together
from asyncrl.environments.tools.calling import check_positive
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt


class AgentEpisodes(EpisodeEnvironment[Calls]):
    """Each episode is one call of an agent, with `base_url`, `api_key`, `model` and `row`.

    Args:
        agent: a function; it runs on the event loop if `async`, otherwise on its own thread.
        args: further arguments of the agent, by name.
        max_calls: limit on calls of the endpoint per episode; one more ends it.
        model: name of the policy in requests.
        ignore: parameters of requests that are ignored, whatever their value. Unless `temperature` is among them the
            agent's own is used, and completions at another temperature than the run's are not trained on.
        reward_when_over: reward of an episode whose agent raised after its context was full or its calls were used up;
            None has `reward.function` score the last reply.
    """

    def __init__(
        self,
        agent: Agent,
        args: Mapping[str, Any] | None = None,
        *,
        max_calls: int,
        model: str,
        ignore: Sequence[str],
        reward_when_over: float | None,
    ) -> None:
        check_positive(max_calls=max_calls)
        if isinstance(ignore, str) or not all(isinstance(each, str) for each in ignore):
            raise ConfigError(f"environment.args.ignore must be a list: environment.args.ignore=[...]; got {ignore!r}")
        self.several_turns = max_calls > 1
        self.reward_when_over = reward_when_over
        self._agent, self._args, self._max_calls, self._model = agent, dict(args or {}), max_calls, model
        needs = "environment.name=openai needs the packages starlette and uvicorn"
        self._endpoint: Any = late_import("openai.endpoint", needs, "agents").Endpoint(model, frozenset(ignore))

    def open(self, prompt: Prompt, tools: EpisodeTools, engine: Together) -> Calls:
        return Calls(tools, engine, self._max_calls)

    async def episode(self, chat: Calls, row: dict[str, Any]) -> float | Mapping[str, float] | None:
        await self._endpoint.start()
        with self._endpoint.serving(chat) as key:
            place = {"base_url": self._endpoint.url, "api_key": key, "model": self._model}
            given = {**place, "row": deepcopy(row), **self._args}
            try:
                outcome = await run_agent(self._agent, given)
            except Exception as error:  # user code: its error may be the consequence of another
                if chat.failure is not None:
                    raise chat.failure from error
                if chat.why_over:
                    raise EpisodeOver(chat.why_over) from error
                raise
        if chat.failure is not None:
            raise chat.failure
        chat.answer, chat.parts = outcome.answer, outcome.parts
        return outcome.reward

    async def close(self) -> None:
        await self._endpoint.close()


class OpenAI(AgentEpisodes):
    """Runs the agent named in the settings.

    Args:
        agent: `file.py:name` or `package.module:name` of a function; see `AgentEpisodes` for the other arguments.
    """

    def __init__(
        self,
        agent: str = "",
        args: Mapping[str, Any] | None = None,
        max_calls: int = 64,
        model: str = "policy",
        ignore: Sequence[str] = ("temperature",),
        reward_when_over: float | None = 0.0,
    ) -> None:
        if not agent:
            raise ConfigError(f"environment.name=openai has no agent. Name a function: {SETTING}=file.py:name")
        given = dict(args or {})
        super().__init__(
            find_agent(agent, given),
            given,
            max_calls=max_calls,
            model=model,
            ignore=ignore,
            reward_when_over=reward_when_over,
        )
