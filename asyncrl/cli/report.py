"""`asyncrl report RUN ...`: see `asyncrl.telemetry.reports.page`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.cli.arguments.output_file import refuse_no_place
from asyncrl.storage.sealed import replace_text
from asyncrl.telemetry.reports.page import page_of

REPORT_FILE = "report.html"


def main(folders: Sequence[Path], to: Path | None) -> int:
    """Raises RunFolderError, ConfigError, OSError."""
    if to is not None:
        refuse_no_place("--to", to)
    path = to or folders[0] / REPORT_FILE
    text = page_of(folders)
    replace_text(path, text)
    print(f"{path}: {len(text.encode()) / 1e6:.1f} MB. It needs no other file. Open it in a browser")
    return 0
