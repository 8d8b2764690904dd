"""Damage a run folder at random while no run is active: `python -m tests.chaos.damage --count 200 --seed 0`.

Each time one file of a recorded run is truncated, flipped in one bit, deleted or swapped with another; then the run is
resumed as `asyncrl local resume=auto` does. The resume must fail with an error that names the file, or log a line that
names it, or end exactly where a resume of the undamaged folder ends. Anything else is silent and counts as a failure.
"""

from __future__ import annotations

import argparse
import collections
import logging
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import AsyncRLError
from asyncrl.telemetry.folder.run_folder import METRICS_FILE
from asyncrl.telemetry.metrics.log import EVAL_SAMPLES_FILE, HISTOGRAMS_FILE, SAMPLES_FILE
from asyncrl.telemetry.metrics.raised import ALARMS_FILE
from tests.chaos.recorded import Outcome, record, resume

KINDS = ("truncate", "flip", "delete", "swap")


@dataclass(frozen=True)
class Damage:
    kind: str
    paths: tuple[str, ...]
    """Relative to the run folder."""
    place: int = 0
    bit: int = 0

    def __str__(self) -> str:
        where = f" at byte {self.place}" if self.kind in ("truncate", "flip") else ""
        return f"{self.kind} {' and '.join(self.paths)}{where}"


class Listener(logging.Handler):
    """Collects the warnings and errors that asyncrl logs, in order."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Listener:
        logging.getLogger("asyncrl").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("asyncrl").removeHandler(self)


SHOWN = (METRICS_FILE, SAMPLES_FILE, EVAL_SAMPLES_FILE, HISTOGRAMS_FILE, ALARMS_FILE)
"""Files for people to read: what is changed in them is not detected."""


def choose(folder: Path, rng: random.Random) -> Damage:
    """Choose a file (two for a swap) and a kind of damage, of those from which a resume continues. Only non-empty
    regular files are truncated or flipped."""
    files = sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    files = [path for path in files if path.name not in SHOWN]
    kind = rng.choice(KINDS)
    if kind in ("truncate", "flip"):
        path = rng.choice([path for path in files if not path.is_symlink() and path.stat().st_size])
        place = rng.randrange(path.stat().st_size)
        return Damage(kind, (path.relative_to(folder).as_posix(),), place, rng.randrange(8))
    chosen = rng.sample(files, 2 if kind == "swap" else 1)
    return Damage(kind, tuple(path.relative_to(folder).as_posix() for path in chosen))


def inflict(damage: Damage, folder: Path) -> None:
    path = folder / damage.paths[0]
    if damage.kind == "delete":
        path.unlink()
    elif damage.kind == "truncate":
        with path.open("r+b") as file:
            file.truncate(damage.place)
    elif damage.kind == "flip":
        with path.open("r+b") as file:
            file.seek(damage.place)
            byte = file.read(1)[0]
            file.seek(damage.place)
            file.write(bytes([byte ^ 1 << damage.bit]))
    else:
        other, aside = folder / damage.paths[1], folder / "swapping"
        path.rename(aside)
        other.rename(path)
        aside.rename(other)


def verdict(damage: Damage, folder: Path, clean: Outcome, usual: list[str]) -> str:
    """Resume in the damaged folder and return `refused`, `told`, `harmless`, or `SILENT` with what is wrong."""
    names = [Path(path).name for path in damage.paths]
    names += [Path(path).stem for path in damage.paths if path.startswith("journal/")]
    with Listener() as heard:
        try:
            outcome = resume(folder, heard.lines.append)
        except AsyncRLError as error:
            named = any(name in str(error) for name in names)
            return "refused" if named else f"SILENT: refused without its name: {error}"
    told = [line for line in heard.lines if line not in usual and any(name in line for name in names)]
    if told:
        return "told"
    different = outcome.differences(clean)
    return f"SILENT: {', '.join(different)} differ; heard {heard.lines}" if different else "harmless"


def run(count: int, seed: int, root: Path) -> tuple[collections.Counter[str], list[str]]:
    """Return the number of damages by kind and outcome, and a description of each silent one."""
    rng = random.Random(seed)
    cleans: dict[bool, tuple[Outcome, list[str]]] = {}
    place = root / "run"
    for finished in (False, True):
        record(root / f"recorded-{finished}", finished=finished)
        shutil.copytree(root / f"recorded-{finished}", place, symlinks=True)
        with Listener() as heard:
            cleans[finished] = resume(place, heard.lines.append), heard.lines
        shutil.rmtree(place)
    ends: collections.Counter[str] = collections.Counter()
    silent: list[str] = []
    for number in range(count):
        finished = rng.random() < 0.5
        shutil.copytree(root / f"recorded-{finished}", place, symlinks=True)
        damage = choose(place, rng)
        inflict(damage, place)
        end = verdict(damage, place, *cleans[finished])
        ends[f"{damage.kind}: {end.partition(':')[0]}"] += 1
        if end.startswith("SILENT"):
            silent.append(f"{number}: {damage} ({'finished' if finished else 'killed'}): {end}")
        shutil.rmtree(place)
    return ends, silent


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as root:
        ends, silent = run(given.count, given.seed, Path(root))
    for end, count in sorted(ends.items()):
        print(f"{count:>5}  {end}")
    for line in silent:
        print(line)
    print(f"{given.count} damages, seed {given.seed}: {len(silent)} silent")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
