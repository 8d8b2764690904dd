"""Read what a run has measured so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_so_far(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of the run's metrics, without a last row that is still being written."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
