"""One episode as a conversation: messages in, replies out, recorded as one trajectory of the tokens as sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.base import Chat, Message, Reply, ToolCall, ToolSpec, TurnOverError
from asyncrl.data.rows.messages import messages_of
from asyncrl.environments.base import EpisodeTools
from asyncrl.environments.episodes import EpisodeOver
from asyncrl.environments.together import Together
from asyncrl.environments.transcript import Transcript
from asyncrl.errors import ContextFullError, EpisodeError
from asyncrl.rewards.score import RewardScore
from asyncrl.types import Completion, Prompt, Trajectory


class Conversation:
    """The conversation of an episode of `ChatEnvironment`.

    Args:
        specs: functions that are described to the policy.
    """

    def __init__(self, prompt: Prompt, tools: EpisodeTools, engine: Together, specs: Sequence[ToolSpec] = ()) -> None:
        assert tools.chat is not None  # `ChatEnvironment` has checked it
        self._chat: Chat = tools.chat
        self._decode, self._encode, self._engine = tools.decode, tools.encode, engine
        self.specs = list(specs)
        self.messages: list[Message] = opening(prompt)
        """All messages so far. Read only: use `add` and its sister methods to add messages."""
        self.replies: list[Reply] = []
        self.truncated = False
        """Whether the end of the context cut the conversation."""
        self._replying = False
        self._new: list[Message] = []
        """Messages added since the last reply."""
        self._inserted: list[int] = []
        """Token ids inserted into the policy's own turn since the last reply."""
        self._transcript: Transcript | None = None
        self._last: tuple[list[int], Completion] | None = None
        """The prompt that the last reply was sampled from, and the reply."""
        self._bonuses: dict[str, float] = {}
        self._ends: list[int] = []
        """Number of parts of the transcript up to and including each reply."""
        self._said: list[NDArray[np.int32]] = []
        """Each reply as it was sampled."""

    def add(self, *messages: Message) -> None:
        """Add messages that the policy reads before its next reply; before its first reply they are appended to the
        prompt.

        Raises:
            DataError: one is not a message of text.
            ValueError: a reply is being sampled.
        """
        self._refuse_meanwhile()
        given = messages_of([*messages], "messages", "chat.add")
        self.messages += given
        if self.replies:
            self._new += given

    def system(self, text: str) -> None:
        """Add a system message; before the first reply it goes to the front."""
        self.add({"role": "system", "content": text})
        if not self.replies:
            self.messages.insert(0, self.messages.pop())

    def user(self, text: str) -> None:
        self.add({"role": "user", "content": text})

    def result(self, call: ToolCall, text: str) -> None:
        """Add the result of a call of the last reply. Markers in it are broken, so that a fetched page cannot imitate a
        turn."""
        self.add({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": self.spell(text)})

    def insert(self, text: str) -> None:
        """Insert text into the policy's own turn, after what it wrote: its next reply continues from there. Outside the
        loss.

        Markers written in `text` take effect: pass untrusted text through `spell` first.

        Raises:
            ValueError: no turn is open, or a reply is being sampled.
        """
        self._refuse_meanwhile()
        if not self.turn_open:
            raise ValueError("the policy's turn has ended, or has not begun: add a message instead")
        self._inserted += self._encode(text).tolist()

    def _refuse_meanwhile(self) -> None:
        """Raises ValueError while a reply is sampled: it would be recorded after what it was not sampled after."""
        if self._replying:
            raise ValueError("the policy is replying: await chat.reply() before the next message or reply")

    def spell(self, text: str) -> str:
        """Return untrusted text with its markers broken."""
        return self._chat.spell(text)

    @property
    def turn_open(self) -> bool:
        """Whether the last reply ended only by one of its `stop` texts, so that it can be continued."""
        if self._last is None or self._new:
            return False
        sampled = self._last[1]
        return sampled.finish_reason == "stop" and not self._chat.ends_turn(sampled.token_ids.tolist())

    def reward(self, value: float, name: str = "turn") -> None:
        """Add to the reward of the episode, under this name in the metrics; it is credited to the last turn.

        Args:
            name: empty for no name.

        Raises:
            EpisodeError: the value is not finite.
        """
        if not math.isfinite(value):
            raise EpisodeError(f"the reward of a turn must be a finite number; got {value}")
        self._bonuses[name] = self._bonuses.get(name, 0.0) + float(value)
        if self._transcript is not None:
            self._transcript.reward(value)

    async def reply(
        self, *, max_tokens: int | None = None, stop: Sequence[str | int] = (), temperature: float | None = None
    ) -> Reply:
        """Sample the policy's next turn.

        Args:
            max_tokens: limit on its tokens; see `Generate`.
            stop: texts or token ids that end it, besides the end of a turn.
            temperature: a temperature other than the run's: the turn is then read but not trained on.

        Raises:
            EpisodeOver: no further turn is possible.
            ChatError: the messages cannot be rendered.
            ValueError: nothing was added since the last reply, or another reply is being sampled.
            GenerationError: the engine could not produce it.
        """
        self._refuse_meanwhile()
        prompt, observed = self._prompt_ids()
        self._replying = True
        try:
            completion = await self._engine.one(
                np.asarray(prompt, np.int32), max_tokens=max_tokens, stop=stop, temperature=temperature
            )
        except ContextFullError as error:
            self.truncated = True
            raise EpisodeOver(str(error)) from error
        finally:
            self._replying = False
        self._take(prompt, observed, completion)
        return self.replies[-1]

    def _prompt_ids(self) -> tuple[list[int], list[int]]:
        """Return all tokens that the next turn is sampled from, and the new ones among them."""
        if self._transcript is None or self._last is None:
            return self._chat.render(self.messages, self.specs), []
        if not self._new and not self._inserted:
            raise ValueError("add a message before the next reply: two turns of the policy in a row would be one")
        prompt, completion = self._last
        before = [*completion.token_ids.tolist(), *self._inserted]
        try:
            follows = self._chat.extend(prompt, before, self._new, self.specs) if self._new else []
        except TurnOverError as error:
            raise EpisodeOver(str(error)) from error
        return [*prompt, *before, *follows], [*self._inserted, *follows]

    def _take(self, prompt: list[int], observed: list[int], completion: Completion) -> None:
        if self._transcript is None:
            self._transcript = Transcript(prompt)
        # Added only now: an observation without a following reply is not part of the trajectory.
        self._transcript.add_observation(observed)
        if completion.trainable:
            self._transcript.add_completion(completion)
        else:
            self._transcript.add_observation(completion.token_ids)
        self._ends.append(self._transcript.parts)
        self._said.append(completion.token_ids)
        self._last, self._new, self._inserted = (prompt, completion), [], []
        reply = self._chat.parse(
            completion.token_ids.tolist(), prompt=prompt, tools=self.specs, finish_reason=completion.finish_reason
        )
        self.replies.append(reply)
        self.messages.append(reply.message())

    @property
    def last_text(self) -> str:
        """Text of the last turn without special tokens, as passed to `reward.function`. Empty if there is none."""
        return self._decode(self._said[-1:])[0] if self._said else ""

    @property
    def turns(self) -> list[str]:
        """Text of every reply, likewise."""
        return self._decode(self._said)

    @property
    def text(self) -> str:
        """Everything after the first prompt, with special tokens; for the sample table."""
        if self._transcript is None or self._last is None:
            return ""
        ids = self._transcript.token_ids
        return self._decode([ids[self._transcript.prompt_length :]], special=True)[0]

    @property
    def sampled(self) -> bool:
        """Whether there is a token to train on."""
        return self._transcript is not None and self._transcript.sampled

    def made(self, score: RewardScore) -> list[tuple[Trajectory, str]]:
        assert self._transcript is not None  # the caller has checked `sampled`
        total = score.value + sum(self._bonuses.values())
        for value, parts in zip(score.turns, self._ends, strict=True) if score.turns else ():
            self._transcript.reward(value, parts)
        named = {name: value for name, value in self._bonuses.items() if name}
        whole = RewardScore(value=total, parts={**score.parts, **named})
        return [(self._transcript.trajectory(whole, truncated=self.truncated), self.text)]


def opening(prompt: Prompt) -> list[Message]:
    """Return the messages of a row; a text becomes a user message."""
    given: Any = prompt.columns.get("prompt", prompt.text)
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [dict(message) for message in given]
