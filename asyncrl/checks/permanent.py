"""Which failures of a library every restart would repeat: an unknown architecture, a missing kernel, a wrong dtype."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

from asyncrl.errors import AsyncRLError, ConfigError

PERMANENT = frozenset(
    {
        "AssertionError", "AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError",
        "NotImplementedError", "TypeError", "ValidationError", "ValueError", "WeightsError",
    }
)  # fmt: skip
"""Names of exceptions that depend on the code and the settings alone."""
PASSING = re.compile(
    r"memory|timed? ?out|address already in use|connection|temporar|too many open files", re.IGNORECASE
)
"""Of these, those that depend on what else the machine does: a process that is ending may still hold GPU memory."""
KERNEL = re.compile(
    r"not implemented for|no kernel image|not supported|expected scalar type|expected .* dtype|same dtype|"
    r"undefined symbol|size mismatch",
    re.IGNORECASE,
)
"""Messages of a RuntimeError that torch raises for a kernel or dtype that does not exist."""
RAISED = re.compile(r"(?:^|\s)(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception)): (\S.*)$")


def is_permanent(kind: str, message: str) -> bool:
    """Whether an exception of this class name, with this message, would be raised again after every restart. Only for
    failures of code whose inputs are the settings and the model."""
    if PASSING.search(message):
        return False
    return kind in PERMANENT or (kind == "RuntimeError" and bool(KERNEL.search(message)))


def lacks_kernel(message: str) -> bool:
    """Whether an engine's failure is that of an operation that does not exist for this dtype or device."""
    return bool(KERNEL.search(message)) and not PASSING.search(message)


@contextlib.contextmanager
def refused_if_permanent(what: str) -> Iterator[None]:
    """Within the block, an exception of a library that every restart would repeat becomes a ConfigError, which no
    supervisor answers with a restart.

    Args:
        what: what cannot be done, with the settings that decide it.
    """
    try:
        yield
    except AsyncRLError:
        raise
    except Exception as error:  # of libraries, for a model that they cannot build: any class of exception
        if not is_permanent(type(error).__name__, str(error)):
            raise
        traceback.print_exc()
        raise ConfigError(f"{what}: {type(error).__name__}: {error}. The traceback is in the log") from error


def raised_in(log: str, *, besides: str = "") -> tuple[str, str]:
    """The class name and the message of the last exception in a log; empty if there is none.

    Args:
        besides: part of a message that is passed over, since it only points to another one.
    """
    found = filter(None, map(RAISED.search, reversed(log.splitlines())))
    return next(((each[1], each[2]) for each in found if not besides or besides not in each[2]), ("", ""))
