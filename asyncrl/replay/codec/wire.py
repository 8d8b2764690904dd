"""The message format on the socket: one msgpack header frame, then raw little-endian payload frames. Never pickle.

    frame 0    msgpack list: schema, run, verb, request id, incarnation and the body
    frame 1..  stored and forwarded unchanged (their layout is in `columns.py` and `extras.py`)

No received value is trusted: sizes, types and ranges are checked before use, and any fault in a message raises
`WireError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from asyncrl.errors import OtherSchemaError, WireError
from asyncrl.types import ExtraHeader

SCHEMA = 16
SEVERAL = b""
"""First frame of a message of several replies without payload, each of one frame: sending many costs as much as one."""
MAX_REQUEST_BYTES = 8 << 20
"""Limit on the header frame of a request."""
MAX_REPLY_BYTES = 256 << 20
"""Limit on the header frame of a reply, which may be a step plan with its headers."""
MAX_MESSAGE_BYTES = 1 << 30
"""Limit on any one frame; libzmq drops a peer that sends more."""
MAX_GROUP_BYTES = 3 << 30
"""Limit on all frames of one group together: a journal record holds 4 GiB."""
MAX_FRAMES = 65536
MAX_TRAJECTORIES = 4096
"""Limit on the trajectories of one group."""
MAX_TOKENS = 1 << 24
"""Limit on the tokens of one trajectory."""
MAX_ID = (1 << 62) - 1
MAX_VERSION = (1 << 31) - 1
MAX_NAME = 256
MAX_TEXT = 1 << 16
MAX_EXTRAS = 64
"""Limit on the extras of one trajectory."""
MAX_EXTRA_NAME = 64
MAX_DIMENSIONS = 8
EXTRA_DTYPES = {
    "|b1": 1, "|u1": 1, "|i1": 1, "<u2": 2, "<i2": 2, "<f2": 2,
    "<u4": 4, "<i4": 4, "<f4": 4, "<u8": 8, "<i8": 8, "<f8": 8,
}  # fmt: skip
"""dtypes that extras may have, and the bytes of one item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The header frame. In a reply, `verb` is `ok`, or the kind of error, whose message is in `body`."""

    run: str
    verb: str
    request: int
    incarnation: str
    body: Any


def pack(value: Any) -> bytes:
    """Pack plain values as msgpack. A lone surrogate (which an error may quote from a text that was cut) has no UTF-8
    encoding and becomes `?`, so that it cannot stop whoever has to report it.

    Raises:
        WireError: `value` contains something other than plain values.
    """
    try:
        try:
            packed = msgpack.packb(value, use_bin_type=True)
        except UnicodeEncodeError:
            packed = msgpack.packb(value, use_bin_type=True, unicode_errors="replace")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot be sent: {error}; only plain values can be sent") from error
    return packed or b""


def unpack(data: bytes | memoryview, *, max_bytes: int = MAX_REQUEST_BYTES) -> Any:
    """Unpack plain values from msgpack bytes; extension types are refused.

    Raises:
        WireError: too long, not msgpack, or nested too deep.
    """
    if len(data) > max_bytes:
        raise WireError(f"a header of {len(data)} bytes exceeds the limit of {max_bytes}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, ext_hook=_refuse_extension, use_list=True)
    except WireError:
        raise
    # All the ways msgpack fails on hostile bytes: wrong UTF-8 and truncation (ValueError), unhashable keys (TypeError),
    # nesting (StackError is a ValueError, RecursionError is not), lengths beyond any memory, extra bytes.
    except (ValueError, TypeError, RecursionError, MemoryError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"not a msgpack header: {type(error).__name__}: {error}") from error


def _refuse_extension(code: int, data: bytes) -> Any:
    raise WireError(f"msgpack extension type {code} is refused")


def encode_envelope(envelope: Envelope) -> bytes:
    return pack([SCHEMA, envelope.run, envelope.verb, envelope.request, envelope.incarnation, envelope.body])


def decode_envelope(frame: bytes | memoryview, *, max_bytes: int = MAX_REQUEST_BYTES) -> Envelope:
    """Decode a header frame. Raises WireError, also for another schema version."""
    value = unpack(frame, max_bytes=max_bytes)
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        raise WireError("a header must be [schema, run, verb, request, incarnation, body]")
    if value[0] != SCHEMA:
        raise OtherSchemaError(
            f"the peer uses wire schema {value[0]}, and this process uses {SCHEMA}. Run the same version of asyncrl "
            "everywhere"
        )
    if len(value) != 6:
        raise WireError(f"a header must have 6 fields, not {len(value)}")
    return Envelope(
        run=text(value[1], "run", MAX_NAME),
        verb=text(value[2], "verb", MAX_NAME),
        request=integer(value[3], "request", 0, MAX_ID),
        incarnation=text(value[4], "incarnation", MAX_NAME),
        body=value[5],
    )


def integer(value: Any, name: str, low: int, high: int) -> int:
    """Raises WireError unless `value` is an int (not a bool) in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{name} must be an integer in [{low}, {high}], not {short(value)}")
    return value


def number(value: Any, name: str) -> float:
    """Raises WireError unless `value` is a finite float or int."""
    if type(value) not in (float, int) or not math.isfinite(value):
        raise WireError(f"{name} must be a finite number, not {short(value)}")
    return float(value)


def turn_numbers(values: Sequence[Any], reward: Any) -> tuple[float, ...]:
    """Check the turn rewards of an episode that earned `reward`.

    Raises:
        WireError: a reward or a sum of them is not finite: a return over them would be a NaN in every advantage of the
            step.
    """
    checked = tuple(number(value, "turn_rewards") for value in values)
    if checked and not math.isfinite(sum(map(abs, checked)) + abs(number(reward, "reward"))):
        raise WireError(f"turn_rewards must have finite sums; got values of up to {max(map(abs, checked)):g}")
    return checked


def text(value: Any, name: str, limit: int = MAX_TEXT) -> str:
    """Raises WireError unless `value` is a string of at most `limit` characters."""
    if type(value) is not str or len(value) > limit:
        raise WireError(f"{name} must be a string of at most {limit} characters, not {short(value)}")
    return value


def sequence(value: Any, name: str, size: int | None = None, limit: int = MAX_FRAMES) -> list[Any]:
    """Raises WireError unless `value` is a list of `size` (or at most `limit`) items."""
    if type(value) is not list or len(value) > limit or (size is not None and len(value) != size):
        expected = f"{size}" if size is not None else f"at most {limit}"
        raise WireError(f"{name} must be a list of {expected} items, not {short(value)}")
    return value


def mapping(value: Any, name: str, limit: int = 1024) -> dict[str, Any]:
    """Raises WireError unless `value` is a map with string keys."""
    if type(value) is not dict or len(value) > limit or not all(type(key) is str for key in value):
        raise WireError(f"{name} must be a map with at most {limit} string keys, not {short(value)}")
    return value


def short(value: Any) -> str:
    shown = repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
    return shown if len(shown) <= 80 else shown[:77] + "..."


def flatten_runs(runs: Sequence[tuple[int, int]]) -> list[int]:
    return [value for run in runs for value in run]


def extra_size(extra: ExtraHeader) -> int:
    """Return the size in bytes of the extra's array."""
    return math.prod(extra.shape) * EXTRA_DTYPES[extra.dtype]


def unsendable(name: Any, dtype: Any) -> str:
    """Return the error message for an extra of a refused dtype."""
    return (
        f"extra {short(name)} has dtype {short(dtype)}; the dtypes that can be sent are {', '.join(EXTRA_DTYPES)}. "
        "Convert it, or send its bytes: a bfloat16 tensor as tensor.view(torch.uint16).numpy()"
    )


def decode_extra_headers(value: Any) -> tuple[ExtraHeader, ...]:
    """Raises WireError: too many extras, two of the same name, an unsupported dtype, or a shape too large for a
    message."""
    headers = tuple(_decode_extra(row) for row in sequence(value, "extras", limit=MAX_EXTRAS))
    if len({header.name for header in headers}) != len(headers):
        raise WireError(f"the names of extras must differ; got {short(str([header.name for header in headers]))}")
    return headers


def _decode_extra(row: Any) -> ExtraHeader:
    name, dtype, shape = sequence(row, "extra", 3)
    if not text(name, "name of an extra", MAX_EXTRA_NAME) or not name.isprintable():
        raise WireError(f"an extra needs a name of 1 to {MAX_EXTRA_NAME} printable characters, not {short(name)}")
    if type(dtype) is not str or dtype not in EXTRA_DTYPES:
        raise WireError(unsendable(name, dtype))
    dimensions = sequence(shape, f"shape of extra {name!r}", limit=MAX_DIMENSIONS)
    extra = ExtraHeader(name, dtype, tuple(integer(item, "dimension", 0, MAX_MESSAGE_BYTES) for item in dimensions))
    # A dimension of 0 must not hide the others: numpy refuses a shape whose other dimensions are too large, and that
    # would crash the learner.
    nbytes = math.prod(max(1, size) for size in extra.shape) * EXTRA_DTYPES[dtype]
    if nbytes > MAX_MESSAGE_BYTES:
        raise WireError(
            f"extra {name!r} of shape {list(extra.shape)} spans {nbytes} bytes, which exceeds the limit of "
            f"{MAX_MESSAGE_BYTES} for one array. Attach it in parts"
        )
    return extra


def integers(value: Any, name: str, low: int, high: int, size: int | None = None) -> list[int]:
    """Check a whole list at once as `integer` does: `size` items, or any number up to MAX_TOKENS. Raises WireError."""
    items = sequence(value, name, size, MAX_TOKENS)
    if items and (set(map(type, items)) != {int} or min(items) < low or max(items) > high):
        for item in items:
            integer(item, name, low, high)
    return items
