"""Extract the programs of docs/environments.md and write them to files."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def programs() -> dict[str, str]:
    """Return file name, from the first line of a block, -> code of the block."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return dict(blocks)


def write_programs(folder: Path) -> Path:
    for name, code in programs().items():
        (folder / name).write_text(code)
    return folder
