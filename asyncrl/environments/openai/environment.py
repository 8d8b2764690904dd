"""`environment.name=openai`: an agent written against OpenAI's API, as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from asyncrl.environments.base import EpisodeTools
from asyncrl.environments.episodes import Asked, EpisodeEnvironment, EpisodeOver
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
        agent: a function, `async` or not: then it has a thread of its own.
        args: further arguments of it, by name.
        max_calls: calls of the endpoint in an episode; one more ends it.
        model: the name by which the policy is asked for.
        ignore: parameters of requests that are left out, whatever the agent asks for. Without `temperature` among them
            the agent's own is obeyed, and what is sampled at another than the run's is not trained on.
        reward_when_over: of an episode whose agent raised after its context was full, or its calls were used up; none
            has `reward.function` score the last reply.
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
            raise ConfigError(f"environment.args.ignore is a list: environment.args.ignore=[...]; got {ignore!r}")
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
            except Exception as error:  # user code: what it raised for may be no fault of its own
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
    """
    Args:
        agent: `file.py:name` or `package.module:name` of a function; see `AgentEpisodes` for the others.
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

    @staticmethod
    def check(**args: Any) -> Asked:
        """Before a start, in a process of its own: what it asks of the chat. Raises ConfigError."""
        return OpenAI(**args).asked
