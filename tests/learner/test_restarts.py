"""What torchrun restarts and what it does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_refused_setting_is_said_once_and_not_tried_again():
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d")
    done = subprocess.run(
        [sys.executable, *torchrun, "--rdzv-endpoint=127.0.0.1:0", "-m", "asyncrl.learner", "learner.steps=many"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert done.stderr.count("asyncrl.learner: ConfigError: ") == 1
    assert "learner.steps=many" in done.stderr
