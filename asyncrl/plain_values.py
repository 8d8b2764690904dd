"""Encodes data rows and results for other processes of this machine: msgpack extended to everything JSON can hold."""

from __future__ import annotations

from typing import Any, cast

import msgpack

LONG = 1
"""Extension code of an integer beyond 64 bits, sent as hex digits."""


def packed(value: Any) -> bytes:
    """Raises OverflowError, ValueError or TypeError: nested too deeply, too large, or not a plain type."""
    # JSON text may hold lone surrogates. They must reach the reward function; an error here would fail the group.
    return cast(bytes, msgpack.packb(value, default=_long, unicode_errors="surrogatepass"))


def unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_value, strict_map_key=False, unicode_errors="surrogatepass")


def _long(value: Any) -> msgpack.ExtType:
    if not isinstance(value, int):
        raise TypeError(f"a {type(value).__name__} is not a plain value")
    return msgpack.ExtType(LONG, b"%x" % value)


def _value(code: int, data: bytes) -> int:
    if code != LONG:
        raise ValueError(f"there is no value of code {code}")
    return int(data, 16)
