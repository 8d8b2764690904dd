"""Records the calls of one episode as a tree of turns, each sampled after exactly the tokens of its parent turn.

A call whose messages continue a turn's conversation continues that turn. Any other call starts a new conversation, and
two calls that continue the same turn branch there. Each leaf is a trajectory; a turn shared by several is trained once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.chat.base import Chat, ChatError, Message, Reply, TurnOverError
from asyncrl.environments.base import EpisodeTools
from asyncrl.environments.openai.answers import message_of
from asyncrl.environments.openai.requests import Call, Refused, conversation_keys
from asyncrl.environments.together import Together
from asyncrl.environments.transcript import Transcript
from asyncrl.errors import AsyncRLError, ContextFullError, RequestError
from asyncrl.rewards.score import RewardScore
from asyncrl.types import Completion, Trajectory

OVER = "the episode that this key belongs to is over, or there never was one"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One reply of the policy."""

    parent: Turn | None
    prompt: list[int]
    """All tokens that it was sampled from: the prompt of its parent, the parent's reply, and `observed`."""
    observed: list[int]
    """Tokens after the parent's reply; for a first turn the whole prompt."""
    completion: Completion
    reply: Reply
    message: Message
    """The reply as the agent received it."""

    @property
    def path(self) -> list[Turn]:
        """Turns from the first to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


class Calls:
    """Implements `environments.episodes.Record`.

    Args:
        most: limit on the calls of the episode, without retries.
    """

    def __init__(self, tools: EpisodeTools, engine: Together, most: int) -> None:
        assert tools.chat is not None  # `EpisodeEnvironment` has checked it
        self._chat: Chat = tools.chat
        self._decode, self._engine, self._most = tools.decode, engine, most
        self._turns: list[Turn] = []
        self._ends: dict[str, Turn] = {}
        """Turns by the conversation up to and including them."""
        self._asked: dict[str, asyncio.Task[list[Turn]]] = {}
        """Tasks by request: a repeated request gets the same answer."""
        self._cut: set[Turn] = set()
        """Turns that no further turn fits after in the context."""
        self._failures: dict[str, BaseException] = {}
        """Errors of requests that have no answer yet."""
        self._closed = False
        self.why_over = ""
        """Why some call was the last of its conversation; empty if none was."""
        self.answer: str | None = None
        """Text that `reward.function` scores, if it is not the last reply."""
        self.parts: dict[str, float] = {}
        """Further numbers that the agent reports besides the reward."""

    async def ask(self, call: Call) -> list[Turn]:
        """Return [n] replies of the policy; a repeated request gets those of the first time.

        Raises:
            Refused: there can be no reply.
            AsyncRLError: the engine could not produce them.
        """
        if self._closed:  # closed while the request's body was being received
            raise Refused(401, OVER, "invalid_api_key")
        task = self._asked.get(call.key)
        if task is None:
            if len(self._asked) >= self._most:
                raise self._over(
                    f"the episode has had its {self._most} calls (environment.args.max_calls)", "too_many_calls"
                )
            task = asyncio.create_task(self._sample(call))
            self._asked[call.key] = task
            task.add_done_callback(lambda done: self._note(call.key, done))
        # The agent may give this request up and repeat it: the generation serves both.
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise Refused(401, OVER, "invalid_api_key") from None

    def _note(self, key: str, task: asyncio.Task[list[Turn]]) -> None:
        """Record the end of a request; a failed one may be repeated."""
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            self._failures.pop(key, None)
            return
        self._asked.pop(key, None)
        if error is not None and not isinstance(error, Refused):
            self._failures[key] = error

    async def _sample(self, call: Call) -> list[Turn]:
        keys = conversation_keys(call.messages, call.tools)
        parent, new = self._followed(keys, call.messages)
        prompt, observed = self._prompt_ids(parent, new, call)
        ids = np.asarray(prompt, np.int32)
        given = {"max_tokens": call.max_tokens, "stop": call.stop, "temperature": call.temperature}
        try:
            completions = await asyncio.gather(*(self._engine.one(ids, **given) for _ in range(call.n)))
        except RequestError as error:
            if isinstance(error, ContextFullError) and parent is not None:
                self._cut.add(parent)
            raise self._over(str(error), "context_length_exceeded") from error
        return [self._take(call, keys[-1], parent, prompt, observed, completion) for completion in completions]

    def _followed(self, keys: Sequence[str], messages: list[Message]) -> tuple[Turn | None, list[Message]]:
        """Return the turn that the messages continue, and the messages after it; or None and all messages for a new
        conversation."""
        last = max((place for place, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
        turn = self._ends.get(keys[last + 1]) if last >= 0 else None
        return turn, messages[last + 1 :] if turn is not None else messages

    def _prompt_ids(self, parent: Turn | None, new: list[Message], call: Call) -> tuple[list[int], list[int]]:
        """Return all tokens that the turn is sampled from, and the new ones among them. Raises Refused."""
        plain = [self._plain(message) for message in new]
        try:
            if parent is None:
                prompt = self._chat.render(plain, call.tools)
                return prompt, prompt
            before = parent.completion.token_ids.tolist()
            follows = self._chat.extend(parent.prompt, before, plain, call.tools)
        except TurnOverError as error:
            raise self._over(str(error), "conversation_over") from error
        except ChatError as error:
            raise Refused(400, str(error), "invalid_value", "messages") from error
        return [*parent.prompt, *before, *follows], follows

    def _plain(self, message: Message) -> Message:
        """Break markers in the message: as in every such API, its content is plain text."""
        if message["role"] == "assistant":
            return message
        return message | {"content": self._chat.spell(message["content"])}

    def _take(
        self, call: Call, key: str, parent: Turn | None, prompt: list[int], observed: list[int], completion: Completion
    ) -> Turn:
        ids = completion.token_ids.tolist()
        reply = self._chat.parse(ids, prompt=prompt, tools=call.tools, finish_reason=completion.finish_reason)
        message = message_of(reply, len(self._turns), call.stop)
        turn = Turn(
            parent=parent, prompt=prompt, observed=observed, completion=completion, reply=reply, message=message
        )
        self._turns.append(turn)
        self._ends[conversation_keys([message], call.tools, after=key)[-1]] = turn
        return turn

    def _over(self, why: str, code: str) -> Refused:
        self.why_over = why
        return Refused(400, why, code, "messages")

    def close(self) -> None:
        """Cancel what is still being generated, and refuse further requests."""
        self._closed = True
        for task in self._asked.values():
            task.cancel()

    @property
    def failure(self) -> AsyncRLError | None:
        """Error of a call without an answer that is not the agent's fault."""
        return next((each for each in self._failures.values() if isinstance(each, AsyncRLError)), None)

    @property
    def sampled(self) -> bool:
        return any(turn.completion.trainable and len(turn.completion.token_ids) for turn in self._turns)

    @property
    def last_text(self) -> str:
        if self.answer is not None or not self._turns:
            return self.answer or ""
        return self._decode([self._turns[-1].completion.token_ids])[0]

    @property
    def turns(self) -> list[str]:
        """Empty unless each call continued the previous one: concurrent conversations are not a sequence."""
        befores = (None, *self._turns)
        if any(turn.parent is not before for turn, before in zip(self._turns, befores, strict=False)):
            return []
        return self._decode([turn.completion.token_ids for turn in self._turns])

    def made(self, score: RewardScore) -> list[tuple[Trajectory, str]]:
        whole = RewardScore(value=score.value, parts={**score.parts, **self.parts})
        followed = {turn.parent for turn in self._turns}
        trained: set[Turn] = set()
        made: list[tuple[Trajectory, str]] = []
        for leaf in self._turns:
            if leaf in followed:
                continue
            transcript = _transcript(leaf.path, trained, score.turns)
            if not transcript.sampled:
                continue  # all of it was trained before, or sampled at another temperature
            trajectory = transcript.trajectory(whole, truncated=leaf in self._cut, branch=bool(made))
            ids = transcript.token_ids[transcript.prompt_length :]
            made.append((trajectory, self._decode([ids], special=True)[0]))
        return made


def _transcript(path: Sequence[Turn], trained: set[Turn], earned: Sequence[float]) -> Transcript:
    """Build the transcript of one path.

    Args:
        trained: turns trained in earlier trajectories, which are only read here; this path's turns are added.
        earned: reward of each turn; empty if not reported.
    """
    transcript = Transcript(path[0].prompt)
    for number, turn in enumerate(path):
        if turn.parent is not None:
            transcript.add_observation(turn.observed)
        if turn.completion.trainable and turn not in trained:
            transcript.add_completion(turn.completion)
            trained.add(turn)
        else:
            transcript.add_observation(turn.completion.token_ids)
        if earned:
            transcript.reward(earned[number])
    return transcript
