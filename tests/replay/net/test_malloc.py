from __future__ import annotations

import resource
from pathlib import Path

import pytest

import asyncrl
from asyncrl.replay.net.malloc import keep_heap

PROCESSES = ("replay/serving.py", "rollout/worker/process.py", "learner/__main__.py")
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


def test_our_processes_set_the_allocator_where_they_begin_and_a_client_leaves_it_alone() -> None:
    room = Path(asyncrl.__file__).parent
    callers = {str(file.relative_to(room)) for file in room.rglob("*.py") if "    keep_heap()" in file.read_text()}
    assert callers == set(PROCESSES)
