"""A machine that vanishes without a word: TCP itself would wait a quarter of an hour."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.weights.vanishing import TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_a_member_notices_within_its_timeout_that_the_publishers_machine_has_vanished() -> None:
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-m", "tests.weights.vanishing"],
        capture_output=True, text=True, timeout=150, check=True,
    )  # fmt: skip
    assert float(done.stdout) < 4 * TIMEOUT_S
