"""The table of named losses in docs/losses.md. `python -m asyncrl.losses.preset_table` writes it there again."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.losses.presets import PRESETS

BEGIN = "<!-- preset table: begin (written by python -m asyncrl.losses.preset_table) -->"
END = "<!-- preset table: end -->"


def preset_table() -> str:
    """Markdown table, one row per preset."""
    lines = ["| preset | paper | token loss | defaults | advantage | users | choose it for |", "|" + "---|" * 7]
    for row in PRESETS.values():
        defaults = ", ".join(f"{key} {value}" for key, value in row.defaults.items()) or "none"
        cells = (f"`{row.name}`", row.paper, row.formula, defaults, row.advantage, row.users, row.when)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """`page` with what stands between the markers replaced by the current table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{preset_table()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/losses.md")
    path.write_text(with_table(path.read_text()))
