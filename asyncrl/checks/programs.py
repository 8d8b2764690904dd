"""Run short programs and read what they print: nvidia-smi, or a separate Python process."""

from __future__ import annotations

import subprocess
from shutil import which

TIMEOUT_S = 60.0
"""Timeout in seconds of such a program."""


def output_of(*command: str) -> str | None:
    """Return what a program prints; None if it is not installed, fails or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def nvidia_smi() -> str | None:
    """Return the output of nvidia-smi: `name, total MiB, used MiB, driver`, a line per GPU. A sentence without commas
    if it fails or hangs; None if it is not installed."""
    query = "--query-gpu=name,memory.total,memory.used,driver_version"
    found = output_of("nvidia-smi", query, "--format=csv,noheader,nounits")
    if found is None and which("nvidia-smi"):
        return "nothing: it fails or hangs. Check that the driver is loaded"
    return found
