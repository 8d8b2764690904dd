"""Filters, well-behaved and not, for the tests of their pool."""

from __future__ import annotations

import os
import time


def keep(group):
    """Behave as the row says."""
    what = group.row["do"]
    if what == "raise":
        raise KeyError("no such thing")
    if what == "hang":
        time.sleep(600)
    if what == "exit":
        os._exit(3)
    if what == "see":
        seen = (group.completions, group.rewards, group.parts, group.finish_reasons, group.lengths)
        return repr(seen)
    nonsense = {"none": None, "number": 1, "empty": "", "list": [True]}
    if what in nonsense:
        return nonsense[what]
    return "too easy" if min(group.rewards) > 0.5 else what == "keep"


async def slowly(group):
    return True


def two_arguments(completions, rewards):
    return True
