"""Rows and what is said of them, on their way to another process of this machine: msgpack that takes what JSON has."""

from __future__ import annotations

from typing import Any, cast

import msgpack

LONG = 1
"""Code of an integer beyond 64 bits, as its digits."""


def packed(value: Any) -> bytes:
    """Raises OverflowError, ValueError or TypeError: it is nested too deep, too large, or of no plain type."""
    # JSON text may hold lone surrogates, too: they must reach a reward function, not stop the group.
    return cast(bytes, msgpack.packb(value, default=_long, unicode_errors="surrogatepass"))


def unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_value, strict_map_key=False, unicode_errors="surrogatepass")


def _long(value: Any) -> msgpack.ExtType:
    if not isinstance(value, int):
        raise TypeError(f"a {type(value).__name__} is no plain value")
    return msgpack.ExtType(LONG, b"%x" % value)


def _value(code: int, data: bytes) -> int:
    if code != LONG:
        raise ValueError(f"there is no value of code {code}")
    return int(data, 16)
