"""The line that a benchmark prints: its answer, with the machine, date and commit of the measurement."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def parse(parser: ArgumentParser, smoke: Mapping[str, Any]) -> Namespace:
    """Parse the arguments. With `--smoke`, defaults come from `smoke`: the smallest that still run everything."""
    parser.add_argument("--smoke", action="store_true", help="the least that runs every part; says nothing about speed")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**smoke)
    return parser.parse_args()


def answer(name: str, result: Mapping[str, Any], *, smoke: bool) -> None:
    """Print the line of `benchmarks/NAME.py` to stdout."""
    line = {
        "benchmark": f"benchmarks.{name}",
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        **({"smoke": True} if smoke else {}),
        "result": result,
    }
    print(json.dumps(line), flush=True)


def commit() -> str:
    """Return the commit of the checkout, with `+` when files differ from it. Empty outside of git."""

    def git(*arguments: str) -> str:
        try:
            return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True).stdout.strip()
        except FileNotFoundError:
            return ""

    found = git("rev-parse", "--short", "HEAD")
    return found + ("+" if found and git("status", "--porcelain", "--untracked-files=no") else "")


def machine() -> str:
    """Describe this machine, as `2 cores of Intel(R) Xeon(R) Processor, 24 GB`, with its GPUs if it has any."""
    words = [line.partition(":")[2].strip() for line in lines("/proc/cpuinfo") if line.startswith("model name")]
    kilobytes = next(int(line.split()[1]) for line in lines("/proc/meminfo") if line.startswith("MemTotal"))
    cpu = f" of {words[0]}" if words else ""
    gpus = [line.partition(":")[2].strip() for path in gpu_files() for line in lines(path) if line.startswith("Model:")]
    return ", ".join([f"{os.cpu_count()} cores{cpu}", f"{round(kilobytes / 2**20)} GB", *gpus])


def gpu_files() -> list[Path]:
    return sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))


def lines(path: str | Path) -> list[str]:
    return Path(path).read_text().splitlines()
