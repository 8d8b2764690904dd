"""Completions that end at a stop text, in the engines that need no process of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.engines.base import GenerateRequest, Sampler
from asyncrl.engines.fake import FakeEngine
from asyncrl.engines.stop_text import end_by_text
from asyncrl.errors import GenerationError
from asyncrl.types import Completion
from tests.engines.models import make_model, plain_logprobs, prompt, request
from tests.engines.running import closing, make_engine


def said(ids: Sequence[int]) -> str:
    """One letter per token."""
    return "".join(chr(0x100 + token) for token in ids)


def stopping(like: GenerateRequest, *stop: str) -> GenerateRequest:
    return replace(like, sampling=replace(like.sampling, stop=stop), text_of=said)


def test_a_completion_ends_with_the_text_and_what_was_sampled_before_stays_the_same() -> None:
    model = make_model("qwen2")
    plain, ids = request(prompt(9), 4, new=24), prompt(9)

    async def both(engine: Sampler) -> tuple[list[Completion], list[Completion], list[Completion]]:
        whole = await engine.generate(plain)
        text = said(whole[0].token_ids[5:7])
        # Beside one that has no such end: rows move when others are done.
        return whole, *await asyncio.gather(engine.generate(stopping(plain, text, "never")), engine.generate(plain))

    engine = make_engine(model)
    whole, cut, beside = asyncio.run(closing(engine, both(engine)))
    text = said(whole[0].token_ids[5:7])
    for one, other, again in zip(whole, cut, beside, strict=True):
        length = end_by_text(stopping(plain, text), one.token_ids.tolist(), 0) or len(one.token_ids)
        assert other.token_ids.tolist() == one.token_ids[:length].tolist()
        assert other.finish_reason == ("stop" if text in said(other.token_ids) else "length")
        assert again.token_ids.tolist() == one.token_ids.tolist()
        np.testing.assert_allclose(other.logprobs, plain_logprobs(model, ids, other), atol=1e-4)
    assert len(cut[0].token_ids) == 7 and cut[0].finish_reason == "stop"


def test_the_fake_engine_ends_by_text_too() -> None:
    engine = FakeEngine()
    plain = request(prompt(4), new=12)
    (whole,) = asyncio.run(engine.generate(plain))
    (cut,) = asyncio.run(engine.generate(stopping(plain, said(whole.token_ids[3:5]))))
    assert cut.token_ids.tolist() == whole.token_ids[:5].tolist() and cut.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["", "x"])
def test_a_stop_that_nobody_can_find_is_refused(stop: str) -> None:
    asked = stopping(request(prompt(4)), stop)
    with pytest.raises(GenerationError, match="stop texts"):
        asyncio.run(FakeEngine().generate(asked if not stop else replace(asked, text_of=None)))


def test_only_the_end_of_a_long_completion_is_read() -> None:
    read: list[int] = []

    def counted(ids: Sequence[int]) -> str:
        read.append(len(ids))
        return said(ids)

    asked = replace(stopping(request(prompt(4)), said([7, 8])), text_of=counted)
    assert end_by_text(asked, [1] * 1000 + [7, 8, 9], 990) == 1002
    assert max(read) < 30
