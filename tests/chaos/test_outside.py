"""The chaos driver leaves no process running, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.alive import is_alive
from tests.waiting import until

from .outside_reader import judge
from .recorded import record

DRIVER = """
import subprocess, sys, time
from pathlib import Path
from tests.chaos import outside

def start(self, steps):
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    child = int(self.process.stdout.readline())
    self.look()
    (self.folder.parent / "started").write_text(f"{self.process.pid} {child}")

outside.prepare = lambda recipe: None
outside.LEAVE_S = 0.0
outside.Outside.start = start
outside.Outside.until_trained = lambda self, more, steps: time.sleep(600)
sys.exit(outside.main())
"""


@pytest.mark.timeout(400)
def test_sigterm_ends_the_run_that_it_drives_and_what_that_left_behind(tmp_path: Path) -> None:
    started = tmp_path / "started"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, f"--folder={tmp_path}"])
    try:
        until(
            lambda: started.exists() and len(started.read_text().split()) == 2,
            within_s=200,
            holds=lambda: driver.poll() is None,
        )
        processes = [psutil.Process(int(word)) for word in started.read_text().split()]
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 128 + signal.SIGTERM
        until(lambda: not any(map(is_alive, processes)))  # killed, and gone when the kernel has come to it
    finally:
        driver.kill()


def test_the_judge_reads_the_journal_that_this_version_writes(tmp_path: Path) -> None:
    record(tmp_path / "run", finished=True)
    found = judge(tmp_path / "run", bound=4)
    assert found.trained == found.acknowledged - sum(found.dropped.values()) > 0
    assert [text for text in found.broken if "metrics" not in text] == []  # a recorded run has rows of its own
