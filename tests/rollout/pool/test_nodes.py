"""What a worker gets on a Ray node away from its pool, and how its end is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.rollout.host import EXIT_FAILED

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(500)]
"""Ray gives each of its nodes 30 s to start, however busy the machine is."""


def test_a_worker_on_another_node_has_its_code_and_variables_and_its_last_lines_are_told(tmp_path):
    environment = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.rollout.pool.two_nodes", str(tmp_path)],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=450, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["refused"].count("has nothing at /not/here (model.path)") == 2, "once for each node"
    assert "rows.jsonl" not in found["refused"]
    assert found["code"] == EXIT_FAILED
    assert found["left"] == [], "what the killed worker was sent is gone before the next one starts"
    words, file = found["said"].rsplit(" ", 1)
    assert words == "from beside of the pool by name"
    assert file.endswith(f"{tmp_path}/code/mine.py") and not Path(file).is_relative_to(tmp_path)
    assert found["log"][-1] == found["said"] and "start 0" in found["log"][0]
    assert found["whole_log"].endswith("waits\nasked to end\n"), "a pool that leaves asks its workers to end, there too"
