from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import time

from asyncrl.rewards.wire import IDLE, PROGRESS_BYTES, begin_call, begin_place, end_call, read_progress

WRITER = """
import mmap, sys
from asyncrl.rewards.wire import PROGRESS_BYTES, begin_call, begin_place, end_call
progress = mmap.mmap(int(sys.argv[1]), PROGRESS_BYTES)
call = 0
while True:
    call += 1
    begin_call(progress, call)
    for place in range(8):
        begin_place(progress, 0, place)
    end_call(progress)
"""


def test_the_progress_record_says_which_call_runs_since_when_and_where():
    progress = mmap.mmap(-1, PROGRESS_BYTES)
    begin_call(progress, 7)
    began = read_progress(progress)
    begin_place(progress, 2, 3)
    now = read_progress(progress)
    end_call(progress)

    assert (began.call_id, began.place, began.term) == (7, -1, 0) and (now.call_id, now.place, now.term) == (7, 3, 2)
    assert began.began <= now.began <= time.monotonic()
    assert read_progress(progress).call_id == IDLE


def test_no_moment_of_a_call_looks_as_if_it_had_begun_long_ago():
    """Or a process that does well would now and then be killed for its deadline."""
    with tempfile.TemporaryFile() as file:
        file.truncate(PROGRESS_BYTES)
        progress = mmap.mmap(file.fileno(), PROGRESS_BYTES)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file.fileno())], pass_fds=(file.fileno(),))
        try:
            while read_progress(progress).call_id == IDLE and writer.poll() is None:
                time.sleep(0.01)
            started, calls = time.monotonic(), set()
            while len(calls) < 2000 and time.monotonic() < started + 60:
                seen = read_progress(progress)
                calls.add(seen.call_id)
                assert seen.call_id == IDLE or seen.began > started - 60, seen
                assert seen.place in range(-1, 8), seen
        finally:
            writer.kill()
            writer.wait()
    assert len(calls) > 100
