"""A reward that waits without computing, for a time that depends on the prompt. Groups become complete one after the
other, as with answers of very different lengths."""

from __future__ import annotations

import asyncio
import os
import zlib
from typing import Any

from asyncrl.rewards.exact_match import exact_match

SPREAD_S = "BENCHMARK_SPREAD_S"
"""Environment variable with the longest wait of a group in seconds. Waits are uniformly distributed below it."""


async def score(completion: str, row: dict[str, Any]) -> float:
    await asyncio.sleep(float(os.environ[SPREAD_S]) * zlib.crc32(str(row["prompt"]).encode()) / 2**32)
    return exact_match(completion, row)
