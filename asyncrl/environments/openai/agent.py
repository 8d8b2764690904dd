"""Finds the user's agent, calls it on a thread or on the event loop, and reads its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments.own_thread import on_own_thread
from asyncrl.errors import ConfigError, EpisodeError
from asyncrl.rewards.score import to_score
from asyncrl.user_code import load_function

SETTING = "environment.args.agent"
GIVEN = ("base_url", "api_key", "model", "row")
Agent = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an agent."""

    reward: float | Mapping[str, float] | None = None
    """None uses `reward.function`."""
    answer: str | None = None
    """Text that `reward.function` gets; None is the last reply."""
    parts: dict[str, float] = field(default_factory=dict)
    """Further numbers besides the reward, by name."""


def find_agent(spec: str, args: Mapping[str, Any]) -> Agent:
    """Load the agent. Raises ConfigError: there is none, or its signature does not accept the arguments of agents."""
    agent = load_function(spec, SETTING)
    try:
        signature = inspect.signature(agent)
        signature.bind(**dict.fromkeys(GIVEN), **args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{SETTING}={spec} cannot be called: {error}. It is called as {spec.rpartition(':')[2]}("
            f"{', '.join(f'{name}=...' for name in (*GIVEN, *args))}), the last of them from environment.args.args"
        ) from error
    return agent


async def run_agent(agent: Agent, given: Mapping[str, Any]) -> Outcome:
    """Call the agent. Raises what the agent raises, and EpisodeError or RewardError for an invalid outcome."""
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__):
        said = await agent(**given)
    else:
        # The thread of an abandoned agent ends with its next call, which is refused, or with the process.
        said = await on_own_thread(lambda: agent(**given), "agent")
        if inspect.isawaitable(said):
            said = await said
    return outcome_of(said)


def outcome_of(said: Any) -> Outcome:
    """Read an agent's result. Raises EpisodeError if it is invalid, or RewardError for a number that is not finite."""
    if said is None:
        return Outcome()
    if isinstance(said, str):
        return Outcome(answer=said)
    if not isinstance(said, Mapping):
        return Outcome(reward=said)  # a number; anything else is refused later
    if "score" in said:
        return Outcome(reward=said)
    answer = said.get("answer")
    if "answer" in said and not isinstance(answer, str):
        raise EpisodeError(f"the agent's answer must be a text; got {answer!r:.80}")
    return Outcome(answer=answer, parts=to_score({**said, "score": 0.0}, "the agent").parts)
