"""The worker's side of a filter: takes groups and returns verdicts; the function itself runs in its own process."""

from __future__ import annotations

import json
from dataclasses import fields

from asyncrl.errors import FilterError
from asyncrl.rewards.filters import FinishedGroup, Verdict, filter_name
from asyncrl.rewards.pool import FunctionPool


class FilterPool(FunctionPool):
    """`async with FilterPool(...) as pool: verdict = await pool.judge(group)`.

    Args:
        function: `file.py:name` or `package.module:name`.
        timeout_s: deadline of one call.
    """

    def __init__(self, function: str, *, timeout_s: float) -> None:
        super().__init__("filter", FilterError, [function], json.dumps(function), workers=1, timeout_s=timeout_s)
        self.name = filter_name(function)

    async def judge(self, group: FinishedGroup) -> Verdict:
        """Judge a group. Raises FilterError: the function raised, returned an invalid verdict, timed out or killed its
        process."""
        keep, why = await self.call({field.name: getattr(group, field.name) for field in fields(group)})
        return Verdict(keep, why)
