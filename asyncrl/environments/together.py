"""Merges identical concurrent requests of siblings into one, so that the engine reads the prompt once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.environments.base import Generate
from asyncrl.types import Completion

Key = tuple[bytes, int | None, tuple[str | int, ...], float | None]


class Together:
    """`generate` for one completion at a time. Requests made in one iteration of the event loop are sent together."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._waiting: dict[Key, list[asyncio.Future[Completion]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def one(
        self,
        token_ids: NDArray[np.int32],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str | int] = (),
        temperature: float | None = None,
    ) -> Completion:
        """Raises what `Generate` raises."""
        key = (token_ids.tobytes(), max_tokens, (stop,) if isinstance(stop, str) else tuple(stop), temperature)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        answer: asyncio.Future[Completion] = loop.create_future()
        self._waiting.setdefault(key, []).append(answer)
        return await answer

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for key, asked in waiting.items():
            answers = [answer for answer in asked if not answer.done()]  # an episode may have ended just now
            if not answers:
                continue
            task = asyncio.get_running_loop().create_task(self._ask(key, answers))
            self._tasks.add(task)  # the loop itself keeps only weak references to tasks
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, key: Key, answers: list[asyncio.Future[Completion]]) -> None:
        ids, max_tokens, stop, temperature = key
        try:
            completions = await self._generate(
                np.frombuffer(ids, np.int32), len(answers), max_tokens=max_tokens, stop=stop, temperature=temperature
            )
        except asyncio.CancelledError:
            for answer in answers:
                answer.cancel()
            raise
        # Any error goes to the callers: here nobody would see it.
        except BaseException as error:
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)
            return
        for answer, completion in zip(answers, completions, strict=True):
            if not answer.done():  # its episode may have ended meanwhile
                answer.set_result(completion)

    def close(self) -> None:
        """Cancel what is still being generated: nobody waits for it."""
        for task in self._tasks:
            task.cancel()
