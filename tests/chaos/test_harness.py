"""Processes that the harness started end with it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.utils.process_tree import command_of, is_alive, process_at
from tests.addresses import free_address
from tests.waiting import until

DRIVER = """
import sys, time
from tests.chaos.harness import Harness
from tests.chaos.settings import ChaosSettings

harness = Harness(ChaosSettings(folder=sys.argv[1], address=sys.argv[2]), 0)
harness.start("server")
print(harness.processes["server"].pid, flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(400)
def test_a_killed_harness_leaves_no_process(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", DRIVER, str(tmp_path / "run"), free_address()]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        server = process_at(int(driver.stdout.readline()))
        try:
            assert server is not None and is_alive(server)
            # Not before it has bound itself and become the server.
            until(lambda: "tests.chaos.server" in command_of(server)[:3], within_s=200)
            driver.send_signal(signal.SIGTERM)
            until(lambda: not is_alive(server), "it outlived the harness", within_s=200)
        finally:
            driver.kill()
            if server:
                server.kill()
