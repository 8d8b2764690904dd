"""A reward that takes its time without using any, another one for each prompt: groups become whole one after the other,
as with answers of very different length."""

from __future__ import annotations

import asyncio
import os
import zlib
from typing import Any

from asyncrl.rewards.exact_match import exact_match

SPREAD_S = "BENCHMARK_SPREAD_S"
"""In the environment: the longest that a group waits; all shorter times are as likely."""


async def score(completion: str, row: dict[str, Any]) -> float:
    await asyncio.sleep(float(os.environ[SPREAD_S]) * zlib.crc32(str(row["prompt"]).encode()) / 2**32)
    return exact_match(completion, row)
