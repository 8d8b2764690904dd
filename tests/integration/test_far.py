"""Workers without a common network with the learner: replay over CURVE and weights by a web server of the folder
that the learner writes to, over a slow link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1900)]
STEPS = 10


def test_a_worker_behind_50_ms_and_a_lossy_link_is_fed_with_deltas_and_both_ends_come_back_after_a_kill(
    tiny_task: dict[str, str], tmp_path: Path
) -> None:
    settings = {
        **tiny_task,
        "learner.steps": STEPS,
        "learner.save_every": 2,
        # So small that most bits of bfloat16 stay: what deltas are for.
        "learner.lr": "1e-6",
        "weights.wire_dtype": "bfloat16",
        "weights.verify_every": 1,
    }
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-m", "tests.integration.far", str(tmp_path)]
        + [f"{key}={value}" for key, value in settings.items()],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    logs = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr[-2000:] + logs
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0 and len(found["killed"]) == 2, logs
    assert [row["step"] for row in found["rows"]] == list(range(1, STEPS + 1))
    assert found["lost"] > 0
    last = found["rows"][-1]
    assert 0 < last["weights/wire_bytes"] < last["weights/bytes"] / 2, "a delta"
    assert last["weights/engines"] >= 1
    (tmp_path / "found.json").write_text(json.dumps(found))
