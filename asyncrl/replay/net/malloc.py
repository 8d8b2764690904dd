"""Memory of payloads that were passed on is used again instead of given back to the operating system.

glibc maps every large buffer anew, or trims its heap once a few MB are free. A process that moves hundreds of MB/s then
spends as long in page faults as in all else, and its threads wait for each other's mappings.

It is a setting of the whole process, so only a process of ours makes it, where it begins: replay server, shard, rollout
worker, learner. Whoever merely opens a client keeps the allocator as it is.
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
"""Bytes; the most that glibc accepts. Larger buffers are still mapped and unmapped one by one."""
KEPT_FREE = 256 << 20
"""Bytes that may stay free at the end of the heap."""
YOUNG, MIDDLE, OLD = 20_000, 20, 50
"""Thresholds of the collector (`gc.set_threshold`)."""


@functools.cache
def keep_heap() -> bool:
    """Once per process. False where the C library is another one; it then works as it always did."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_CHUNK)) and bool(mallopt(TRIM_THRESHOLD, KEPT_FREE))


def spare_collector() -> None:
    """For a process that does nothing but serve: what is there when it begins stays, and the headers of open groups are
    no cycles. Looking through all of them again and again would take a tenth of its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
