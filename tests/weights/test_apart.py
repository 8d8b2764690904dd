"""Workers whose machines do not reach each other, between network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def served(seconds: float, way: str) -> tuple[dict[str, Any], str]:
    """Run the scene; returns what it printed, and all logs."""
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-m", "tests.weights.apart", str(seconds), way],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("way", ["drop", "refuse"])
def test_over_sockets_workers_that_do_not_reach_each_other_all_get_every_version(way: str) -> None:
    """Before, the second never got one, and the others waited for each try."""
    found, log = served(12.0, way)
    later = {name: {version for version, _ in versions} for name, versions in found["served"].items()}
    assert set(later) == {"w0", "w1", "w2"}, log
    for name in later:
        assert later[name] >= set(range(2, found["published"] - 1)), (name, later, log)
    assert "no connection to another worker" in log and "have no connection to another one" in log
    assert found["epochs"] <= 4, log
