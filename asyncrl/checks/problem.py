"""What a rule yields: the rule, the value, the way out, as one message each."""

from __future__ import annotations

from collections.abc import Iterator

Problems = Iterator[str]
