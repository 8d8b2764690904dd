"""What other programs say when they are asked: nvidia-smi, or a Python of its own."""

from __future__ import annotations

import subprocess
from shutil import which

TOLD_S = 60.0
"""Longest wait for a program that is asked something."""


def told_by(*command: str) -> str | None:
    """What a program prints; None where there is none, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOLD_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def smi_says() -> str | None:
    """Of each GPU, see `gpus`; None where there is no nvidia-smi."""
    query = "--query-gpu=name,memory.total,memory.used,driver_version"
    told = told_by("nvidia-smi", query, "--format=csv,noheader,nounits")
    return "nothing: it fails or hangs. See that the driver is loaded" if told is None and which("nvidia-smi") else told
