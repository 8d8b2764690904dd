"""Run episodes of conversational environments, with a policy whose turns the test writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.chat.renderer import RendererChat
from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.stop_text import end_by_text
from asyncrl.environments.base import Environment, Episodes
from asyncrl.environments.guard import GuardedEnvironment
from asyncrl.errors import RewardError
from asyncrl.rewards.score import RewardScore
from asyncrl.rollout.groups.episode import EpisodeRunner
from asyncrl.rollout.worker.tokenizer import make_decode, make_encode
from asyncrl.types import Completion, Prompt, SamplingParams
from tests.chat.markers import tokenizer

VOCABULARY = 1000
TOKENIZER: Any = tokenizer("<|im_end|>")
CHAT = RendererChat(TOKENIZER, "qwen3", {}, chosen=True)
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=400, stop_token_ids=CHAT.stop_token_ids)


def letters(text: str) -> list[int]:
    """Return the tokens of a turn as the policy writes it: markers as markers, and everything else letter by letter,
    `hello` too."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return [each for one in ids for each in (b"hello" if TOKENIZER.decode([one]) == "hello" else [one])]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Scripted:
    """An engine whose turn k of every member is `turns[k]`, or `turns(prompt_text)` if `turns` is a function."""

    max_length = 4000

    def __init__(self, turns: Any) -> None:
        self.turns = turns
        self.requests: list[GenerateRequest] = []
        self.version = 3

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        await asyncio.sleep(0)
        text = TOKENIZER.decode(request.prompt_ids.tolist())
        turn: Any = self.turns(text) if callable(self.turns) else self.turns[text.count("<|im_start|>assistant\n") - 1]
        ids = letters(turn + "<|im_end|>")
        place = next((at for at, token in enumerate(ids) if token in request.sampling.stop_token_ids), len(ids))
        ids = ids[: place + 1]
        cut = end_by_text(request, ids, 0)
        ids = ids[: min(cut or len(ids), request.sampling.max_new_tokens)]
        stopped = cut is not None or ids[-1] in request.sampling.stop_token_ids
        return [
            Completion(
                token_ids=np.array(ids, np.int32),
                logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 100,
                policy_versions=np.full(len(ids), self.version, np.int32),
                finish_reason="stop" if stopped else "length",
            )
            for _ in range(request.n)
        ]


async def play(
    environment: Environment,
    turns: Any,
    *,
    prompt: Any = "hi",
    size: int = 1,
    engine: Scripted | None = None,
    score: Any = None,
    columns: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Episodes, Scripted]:
    """Run one group, and return its episodes and the engine."""
    engine = engine or Scripted(turns)

    async def last_word(texts: list[str], row: dict[str, Any], **_: Any) -> list[RewardScore | RewardError]:
        return [RewardScore(value=float(row.get("answer", "") in text)) for text in texts]

    runner = EpisodeRunner(
        engine=engine,  # pyright: ignore[reportArgumentType]
        environment=GuardedEnvironment("tested", environment, VOCABULARY),
        decode=make_decode(TOKENIZER),
        encode=make_encode(TOKENIZER),
        score=score or last_word,
        chat=CHAT,
        **settings,
    )
    ids = np.asarray(CHAT.render([{"role": "user", "content": str(prompt)}]), np.int32)
    row = {"prompt": prompt, **(columns or {})}
    given = Prompt(index=0, epoch=0, row=0, token_ids=ids, text=str(prompt), columns=row)
    return await runner._run(given, size, SAMPLING, name="g", seed=1), engine


def sampled_texts(episodes: Episodes, member: int = 0) -> list[str]:
    """Return the texts of the runs of loss tokens in one trajectory."""
    trajectory = episodes.trajectories[member]
    edges = np.flatnonzero(np.diff(np.r_[0, trajectory.loss_mask.astype(int), 0]))
    return [TOKENIZER.decode(trajectory.token_ids[a:b].tolist()) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def exact(episodes: Episodes, engine: Scripted) -> None:
    """Check that the loss mask of each trajectory covers exactly the tokens sampled for the requests whose prompts the
    trajectory begins with, and that log-probs and policy versions are set for these tokens alone."""
    for trajectory in episodes.trajectories:
        ids: Sequence[int] = trajectory.token_ids.tolist()
        mine = [one for one in engine.requests if ids[: len(one.prompt_ids)] == one.prompt_ids.tolist()]
        covered = np.zeros(len(ids), bool)
        for one in mine:
            start = len(one.prompt_ids)
            stop = next((i for i in range(start, len(ids)) if not trajectory.loss_mask[i]), len(ids))
            covered[start:stop] = True
        assert mine and (covered == trajectory.loss_mask).all()
        assert (trajectory.behavior_logprobs[~covered] == 0).all() and (trajectory.behavior_logprobs[covered] < 0).all()
        assert (trajectory.policy_versions[covered] >= 0).all() and (trajectory.policy_versions[~covered] == -1).all()
