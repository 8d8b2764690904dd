"""Keeps the memory of forwarded payloads for reuse instead of returning it to the operating system.

By default, glibc maps every large buffer anew, or trims its heap once a few MB are free. A process that moves hundreds
of MB/s then spends as long in page faults as in all its other work, and its threads wait for each other's mappings.

The setting affects the whole process, so only asyncrl's own processes make it, when they start: replay server,
rollout worker, learner. A process that merely opens a client keeps its allocator unchanged.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import platform

TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
"""Parameter numbers of `mallopt(3)`."""
LARGEST_CHUNK = 32 << 20
"""The largest value that glibc accepts, in bytes. Larger buffers are still mapped and unmapped one by one."""
KEPT_FREE = 256 << 20
"""Bytes that may stay free at the end of the heap."""
YOUNG, MIDDLE, OLD = 20_000, 20, 50
"""Thresholds of the garbage collector (`gc.set_threshold`)."""


@functools.cache
def keep_heap() -> bool:
    """Set the allocator's thresholds, once per process. Returns False, changing nothing, if there is no glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_CHUNK)) and bool(mallopt(TRIM_THRESHOLD, KEPT_FREE))


def spare_collector() -> None:
    """Make the garbage collector run less often, for a process that only serves: the objects of its start stay alive,
    and the headers of open groups have no cycles. Scanning all of them repeatedly would take a tenth of its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
