"""The programs of docs/environments.md, as files."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def programs() -> dict[str, str]:
    """File name, from a block's first line, -> its code."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return dict(blocks)


def write_programs(folder: Path) -> Path:
    for name, code in programs().items():
        (folder / name).write_text(code)
    return folder
