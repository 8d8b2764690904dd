"""Asks an environment for its first request for some rows, before anything is started: it may add tools, a system
message or an observation to a row's prompt, or read other columns.

`python -m asyncrl.environments.first_request ANSWER_FD PARENT_PID` is internal: the environment runs in this process,
with an engine that answers nothing, so that user code never runs in a command that only starts the others.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.base import Chat, ChatError
from asyncrl.chat.hub import described_in
from asyncrl.data.local_tokenizer import LocalTokenizer, load_local_tokenizer
from asyncrl.environments.base import Environment, EpisodeTools
from asyncrl.environments.guard import close_environment
from asyncrl.environments.registry import SETTING, find_environment, make_environment
from asyncrl.errors import AsyncRLError, GenerationError
from asyncrl.plain_values import packed, unpacked
from asyncrl.rewards.score import Outcome
from asyncrl.schema import EnvironmentConfig, ModelConfig
from asyncrl.types import Completion, Prompt
from asyncrl.user_code import ask_process, question_of

MODULE = "asyncrl.environments.first_request"
ASK_S = 60.0
"""Limit on the seconds until an environment makes its first request."""
START_S = 300.0
"""Limit on the seconds of all rows together, the start of the environment included."""


def first_requests(
    config: EnvironmentConfig, model: ModelConfig, rows: Sequence[Mapping[str, Any]]
) -> list[tuple[int, str]]:
    """Return the length in tokens and the text, with special tokens, of the first request for each row; as rendered by
    the chat template in the model's folder. Empty if they cannot be known before a start.

    Raises:
        ConfigError: creating the environment failed, ended its process, or took too long.
    """
    question = packed([{"name": config.name, "args": dict(config.args)}, model.path, dict(model.chat), list(rows)])
    doing = f"{SETTING}={config.name}: its first requests"
    return [(int(count), str(text)) for count, text in unpacked(ask_process(MODULE, question, doing, START_S))]


class _Renderer:
    """The part of a chat that a first request needs, without transformers. Anything else ends the episode."""

    stop_token_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()

    def __init__(self, tokenizer: LocalTokenizer) -> None:
        self.render, self.encode, self.decode = tokenizer.render, tokenizer.encode, tokenizer.decode

    def spell(self, text: str) -> str:
        return text

    def __getattr__(self, name: str) -> Any:
        raise ChatError(f"nothing was sampled yet, so there is no `{name}`")


async def ask(environment: Environment, tokenizer: LocalTokenizer, row: Mapping[str, Any]) -> list[int] | None:
    """Return the token ids of the environment's first request for a row; None if it makes none.

    waits for: the request; unblocked by: it, the end of the episode, or ASK_S.
    """
    prompt = row.get("prompt")
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.render(prompt or [])
    asked: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

    async def generate(token_ids: NDArray[np.int32], n: int = 1, **_: Any) -> list[Completion]:
        if not asked.done():
            asked.set_result(token_ids.tolist())
        raise GenerationError("nothing is sampled before the start")

    async def score(completions: list[str], row: dict[str, Any], **_: Any) -> list[Outcome]:
        raise GenerationError("nothing is scored before the start")

    def decode(sequences: Sequence[NDArray[np.int32]], *, special: bool = False) -> list[str]:
        return [tokenizer.decode(each.tolist()) for each in sequences]

    tools = EpisodeTools(
        generate=generate,
        decode=decode,
        encode=lambda text: np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32),
        score=score,
        chat=cast("Chat", _Renderer(tokenizer)),
        timeout_s=ASK_S,
    )
    given = Prompt(
        index=0, epoch=0, row=0, token_ids=np.asarray(ids, np.int32), text=tokenizer.decode(ids), columns=dict(row)
    )
    running = asyncio.ensure_future(environment.run(given, 1, tools))
    await asyncio.wait([asked, running], timeout=ASK_S, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return asked.result() if asked.done() else None


async def _answers(settings: Mapping[str, Any], tokenizer: LocalTokenizer, rows: Sequence[Any]) -> list[Any]:
    config = EnvironmentConfig(**settings)
    without_starting = getattr(find_environment(config), "for_first_request", None)
    args = without_starting(**config.args) if without_starting else config.args
    environment = make_environment(EnvironmentConfig(name=config.name, args=dict(args)))
    try:
        found = [await ask(environment, tokenizer, row) for row in rows]
    finally:
        await close_environment(environment)
    return [] if None in found else [[len(ids), tokenizer.decode(ids)] for ids in found if ids is not None]


def main(arguments: list[str]) -> None:
    question, out = question_of(arguments)
    settings, path, options, rows = unpacked(question)
    answer: list[Any] = []
    try:
        tokenizer = load_local_tokenizer(described_in(path) or Path(path), options)
        if tokenizer is not None:
            answer = asyncio.run(_answers(settings, tokenizer, rows))
    except (AsyncRLError, ValueError):
        pass  # refused by the checks of environment and data, in their words
    with out:
        out.write(packed(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
