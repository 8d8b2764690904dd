from __future__ import annotations

import resource

import pytest

from asyncrl.replay.heap import keep_heap

CHUNK = 8 << 20
ROUNDS = 50


@pytest.mark.skipif(not keep_heap(), reason="another C library than glibc")
def test_a_payload_buffer_that_was_freed_is_used_again_without_page_faults() -> None:
    def turn_over() -> None:
        held = [bytearray(CHUNK) for _ in range(4)]
        held.clear()

    turn_over()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        turn_over()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < ROUNDS * 4 * CHUNK // resource.getpagesize() // 10
