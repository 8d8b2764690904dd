"""Lists the checkpoints of a run folder, selects the one that a resume continues from, and reads the step of each. Free
of torch, for processes that only look.

ckpt/step_50/  state.json ...        latest -> step_50        left_step_90/        branch.json
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from asyncrl.errors import CheckpointDamagedError, CheckpointError, RunFolderError
from asyncrl.storage import sealed
from asyncrl.storage.full_disk import disk_space
from asyncrl.storage.objects import read_object

CHECKPOINT_DIR = "ckpt"
STATE_FILE = "state.json"
REPLAY_FILE = "replay.msgpack"
"""The snapshot of the source of the rows: the replay, or the data of `asyncrl sft`."""
SUPERVISED = "sft"
"""Schema of the snapshot in a checkpoint of `asyncrl sft`, which has no replay; schemas of a replay are numbers."""
LATEST = "latest"
DAMAGED = "damaged_"
"""Prefix of a checkpoint that was skipped because one of its files is damaged."""
LEFT = "left_"
"""Prefix of a checkpoint of a line of training that a branch left. A resume uses it only if it is named."""
EXPORT_DIR = "hf"
"""Name of an exported model, also in the folder of its run."""
EXPORTS = "exports"
EXPORTED_FILE = "exported.json"
"""File in the folder of an exported model that says after how many steps it was exported."""
BRANCH_FILE = "branch.json"
"""Describes the newest branch: which start began it, and from where."""
RUN_FILE = "run.json"
"""File in the folder of a run that says whose it is."""
FORKED_FROM = "forked_from"
"""Its entry with the path that `resume` named, if it named one: written before any process of the run starts, while a
branch begins only once the models are loaded."""
_NAME = re.compile(rf"step_(0|[1-9]\d*)|{LEFT}step_(\d+)(?:_\d+)?", re.ASCII)
"""Names that this program gives; a copy that a user calls `step_070` is none of its checkpoints."""


def finished(folder: Path) -> list[Path]:
    """Complete checkpoints, sorted by step. Those being written or removed are called `.tmp`."""
    whole = [path for path in folder.glob("step_*") if path.suffix != ".tmp" and _step_of(path) is not None]
    return sorted(whole, key=lambda path: _step_of(path) or 0)


def last_saved(folder: Path) -> int:
    """The step of the newest checkpoint, by its name alone; 0 if there is none."""
    return max((_step_of(path) or 0 for path in finished(folder)), default=0)


def _step_of(path: Path) -> int | None:
    named = _NAME.fullmatch(path.name)
    return int(named[1] or named[2]) if named else None


def _steps_of(path: Path) -> int:
    """The steps of a checkpoint by its name; of a copy with another name by what it holds."""
    named = _step_of(path)
    if named is None:
        with contextlib.suppress(CheckpointError):
            named = position_of(path)[0]
    return named or 0


def newest(folder: Path) -> tuple[Path | None, str]:
    """The checkpoint that `latest` names, else the one with the most steps; and a message about a missing link."""
    latest, whole = folder / LATEST, finished(folder)
    if latest.is_symlink():
        path = folder / latest.readlink()
        if path.parent.resolve() == folder.resolve():  # a user may have written the link with more of the path
            path = folder / path.name
        if path in whole or not whole or _named(path, folder):
            return path, ""
        return whole[-1], (
            f"{latest} points to {latest.readlink()}, which does not exist: continuing from {whole[-1].name}"
        )
    if whole:
        lost = "is not a link (a copy may have followed it)" if latest.exists() else "is missing"
        return whole[-1], f"{latest} {lost}: continuing from {whole[-1].name}, the checkpoint with the most steps"
    return None, ""


def _named(path: Path, folder: Path) -> bool:
    """Whether it is a checkpoint with a name that `finished` does not list: of a line that a branch left, or a copy
    that a user made. Such a one is the newest if a resume named it."""
    left = path.name.startswith(f"{LEFT}step_") and path.is_dir()
    return path.parent == folder and path.suffix != ".tmp" and (left or (path / STATE_FILE).is_file())


def exported(checkpoint: Path, name: str = EXPORT_DIR) -> Path:
    """The path of the exported model of a checkpoint: exports/step_50/hf in the folder of the run."""
    return checkpoint.parent.parent / EXPORTS / checkpoint.name / name


def newest_whole(folder: Path) -> tuple[Path | None, list[tuple[Path, str]], str]:
    """The newest checkpoint whose files are all as they were written.

    Returns:
        The checkpoint; the newer ones that are damaged, each with the reason; the message of `newest`.
    Raises:
        CheckpointDamagedError: for the newest one, if none is intact.
    """
    path, said = newest(folder)
    damaged: list[tuple[Path, str]] = []
    first: CheckpointDamagedError | None = None
    steps = 0 if path is None else _steps_of(path)
    older = [each for each in finished(folder) if _steps_of(each) < steps]
    for candidate in [path, *reversed(older)] if path is not None else []:
        try:
            sealed.verify(candidate)
        except (OSError, CheckpointDamagedError) as error:
            if not candidate.is_dir() and newest(folder)[0] != path:
                return newest_whole(folder)  # a running run saved others meanwhile, and deleted this one
            if not isinstance(error, CheckpointDamagedError):
                raise
            first = first or error
            damaged.append((candidate, str(error)))
        else:
            return candidate, damaged, said
    if first is not None:
        raise first
    return None, [], said


def put_aside(folder: Path, damaged: list[tuple[Path, str]], whole: Path) -> list[str]:
    """Make `whole` the newest checkpoint. Returns a message for each damaged one."""
    lines: list[str] = []
    for path, why in damaged:
        name = next(name for name in _names(f"{DAMAGED}{path.name}") if not (folder / name).exists())
        if path.is_dir():
            path.rename(folder / name)
        lines.append(
            f"{path} IS DAMAGED and is passed over: {why}. Continuing from {whole.name}; the steps after it are "
            f"trained again. The damaged one is kept as {name} until you delete it"
        )
    if damaged:
        with disk_space(folder / LATEST, 0):
            sealed.point(folder / LATEST, whole)
    return lines


def position_of(path: Path) -> tuple[int, int]:
    """`(trained steps, policy_version)` of a checkpoint.

    Raises:
        CheckpointError: its state file cannot be read.
    """
    try:
        state = read_object(path / STATE_FILE)
        return int(state["step"]) + 1, int(state["policy_version"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{path / STATE_FILE} cannot be read: {error!r}; restore it from a copy, or delete {path} and resume from "
            "an older checkpoint: resume=PATH"
        ) from error


def prune(folder: Path, newest_step: Path, keep: int, spared: Collection[str] = (), *, every: int = 0) -> list[Path]:
    """Retire old checkpoints. Kept are `newest_step` and the `keep` - 1 before it, those whose names are spared, those
    at multiples of `every` steps, and those with more steps than `newest_step`: a user copied them here, or the run
    will save them again. If they counted, none before the newest would be kept. Returns the folders to remove,
    including incomplete ones that a crash left; removing many gigabytes takes time."""
    steps = _steps_of(newest_step)
    old = [path for path in finished(folder) if path != newest_step and _steps_of(path) <= steps]
    old = old[: -keep + 1 or None]
    stays = {path.name for path in old if every and not (_step_of(path) or 0) % every} | set(spared)
    for path in old:
        if path.name not in stays:
            sealed.retire(path)
    return list(folder.glob("step_*.tmp"))


def chosen(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint that `resume` (never, auto, PATH) continues from; None to start from the model itself."""
    if resume == "never":
        return None
    return newest(run_dir / CHECKPOINT_DIR)[0] if resume == "auto" else Path(resume)


def newest_proven(run_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of a run whose files are all as they were written.

    Args:
        say: receives a message for each checkpoint that is passed over.

    Raises:
        CheckpointDamagedError: no checkpoint is intact.
    """
    path, damaged, said = newest_whole(run_dir / CHECKPOINT_DIR)
    if said:
        say(said)
    for _, why in damaged:
        say(f"{why}. A resume passes it over, and continues from the newest one that is whole")
    return path


def proven(run_dir: Path, resume: str, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that a learner will continue from with `resume`; for auto see `newest_proven`.

    Raises:
        CheckpointDamagedError: the named checkpoint is damaged, or none is intact.
        RunFolderError: with auto, if a branch began here that has saved no checkpoint yet.
    """
    if resume != "auto":
        path = chosen(run_dir, resume)
        if path is not None:
            sealed.verify(path.resolve())
        return path
    path = newest_proven(run_dir, say)
    if path is None:
        refuse_bare_fork(run_dir / CHECKPOINT_DIR)
    return path


def trained_steps(checkpoint: Path | None) -> int:
    """Number of steps trained before the checkpoint was saved; 0 for None.

    Raises:
        CheckpointError: its state file cannot be read.
    """
    return position_of(checkpoint)[0] if checkpoint is not None else 0


def trained_in(exported: Path) -> int | None:
    """Number of steps of an exported model; None if there is no model or it has no such record. If a run was trained
    further and did not end, its exported model has fewer steps than its checkpoints."""
    try:
        return int(read_object(exported / EXPORTED_FILE)["trained_steps"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def branch_begun(folder: Path, resume: str, start: str) -> bool:
    """Whether `start`, the id of a start of the run, has already begun its branch from `resume`."""
    try:
        return read_object(folder / BRANCH_FILE) == {"start": start, "from": resume}
    except (OSError, ValueError):
        return False


def _branch_from(folder: Path) -> str:
    """The value of `resume` when the newest branch of `folder` began; empty if none did."""
    try:
        return str(read_object(folder / BRANCH_FILE)["from"])
    except (OSError, ValueError, KeyError):
        return ""


def forked_from(run_dir: Path) -> str:
    """The checkpoint that the last `resume=PATH` of this run named; empty if there was none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return str(read_object(run_dir / RUN_FILE).get(FORKED_FROM, ""))
    return ""


def is_of_another_run(checkpoint: Path, folder: Path, run: str) -> bool:
    """Whether the checkpoint belongs to another run than `run`, whose folder is `folder`: it is not in `folder`, was
    not saved by `run`, and the branch of `folder` did not begin from it."""
    checkpoint, begun = checkpoint.resolve(), _branch_from(folder)
    if checkpoint.parent == folder.resolve() or (begun and Path(begun).resolve() == checkpoint):
        return False
    try:
        return run_of((checkpoint / STATE_FILE).read_bytes()) not in ("", run)
    except OSError:  # reported by whoever reads the checkpoint
        return False


def run_of(state: str | bytes) -> str:
    """The run that is named in a checkpoint's STATE_FILE; empty if none is, or the file is damaged."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        return str(json.loads(state).get("run", ""))
    return ""


def refuse_bare_fork(folder: Path) -> None:
    """Check for a branch without a checkpoint, when `resume=auto` finds no checkpoint in `folder`.

    Raises:
        RunFolderError: a branch began here, or was to begin, and saved none; the run would silently start from the
            model itself.
    """
    begins = _branch_from(folder) or forked_from(folder.parent)
    if not begins:
        return
    raise RunFolderError(
        f"{folder.parent} was begun from {begins} and ended before it saved a checkpoint of its own: resume=auto would "
        f"begin at step 0, with the model itself. Continue with resume={begins}, or start again with overwrite=true"
    )


def begin_branch(folder: Path, checkpoint: Path, resume: str, start: str) -> list[tuple[str, str]]:
    """Make `checkpoint`, which `resume` names, the newest one. If the run dies before its next save, a resume continues
    from it, and it is not deleted as older than checkpoints of the line that is left.

    Returns:
        Old and new name of each checkpoint put aside: those of another line, or all if `checkpoint` is not in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = checkpoint.parent == folder.resolve()
    begins = position_of(checkpoint) if own else (-1, -1)
    left: list[tuple[str, str]] = []
    for path in finished(folder):
        if path.resolve() != checkpoint and not _before(path, begins):
            name = next(name for name in _names(f"{LEFT}{path.name}") if not (folder / name).exists())
            left.append((path.name, name))
            path.rename(folder / name)
    if own:
        with disk_space(folder / LATEST, 0):
            sealed.point(folder / LATEST, checkpoint)
    else:
        (folder / LATEST).unlink(missing_ok=True)
    note = json.dumps({"start": start, "from": resume}) + "\n"
    with disk_space(folder / BRANCH_FILE, len(note)):
        sealed.replace_text(folder / BRANCH_FILE, note)
    return left


def left_names(folder: Path, name: str) -> list[str]:
    """Present names of the checkpoints that were called `name` before a branch left their line, the newest last."""
    pattern = re.compile(rf"{LEFT}{re.escape(name)}(?:_(\d+))?", re.ASCII)
    named = map(pattern.fullmatch, (path.name for path in folder.glob(f"{LEFT}*")))
    found = {int(left[1] or 1): left[0] for left in named if left}
    return [found[number] for number in sorted(found)]


def _before(path: Path, position: tuple[int, int]) -> bool:
    """Whether the checkpoint is on the line of training that led to `position`. Policy versions are never used twice,
    so a checkpoint of a line that began later from fewer steps has a larger version."""
    try:
        return all(map(operator.le, position_of(path), position))
    except CheckpointError:  # damaged
        return (_step_of(path) or 0) <= position[0]


def _names(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))
