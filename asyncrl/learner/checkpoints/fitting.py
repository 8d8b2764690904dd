"""Checks whether a checkpoint belongs to the model that is to be filled from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from asyncrl.errors import CheckpointMismatchError
from asyncrl.learner.checkpoints.writing import named_tensors
from asyncrl.learner.optimizer.eight_bits import SCALE, in_fewer_bits
from asyncrl.learner.optimizer.one_by_one import MOMENTS
from asyncrl.learner.roles import Roles
from asyncrl.storage.checkpoints import EXPORT_DIR

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by their names in a checkpoint: `model.hf.lm_head.weight`,
`optimizer.state.hf.lm_head.weight.step`."""


def shapes_in(path: Path) -> Shapes:
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def check_fits(path: Path, saved: Shapes, loaded: Mapping[str, Any]) -> None:
    """Raises CheckpointMismatchError if tensors differ. DCP loads what is requested and ignores the rest: a model with
    fewer layers would continue with part of another one."""
    wanted = {name: tuple(tensor.shape) for name, tensor in named_tensors(loaded)}
    problems = [f"{_plain(name)} is in the checkpoint only" for name in saved if name not in wanted]
    problems += [f"{_plain(name)} is in the model only" for name in wanted if name not in saved]
    problems += [
        f"{_plain(name)} is {list(saved[name])} in the checkpoint and {list(shape)} in the model"
        for name, shape in wanted.items()
        if saved.get(name, shape) != shape
    ]
    if problems:
        raise CheckpointMismatchError(
            f"{path} does not fit the model, {len(problems)} tensors differ: {'; '.join(problems[:3])}"
            f"{'; ...' if len(problems) > 3 else ''}. Resume with the model.path (and critic.path) it was trained with"
        )


def _plain(name: str) -> str:
    """Readable name: `model.norm.weight (model)`, `model.norm.weight.exp_avg (optimizer)`."""
    part, _, rest = name.partition(".")
    return f"{rest.removeprefix('state.').removeprefix('hf.')} ({part})"


def check_roles(path: Path, saved: Shapes, roles: Roles) -> None:
    """Compare the roles before the tensors, so that the message names the setting at fault."""
    parts = {name.partition(".")[0] for name in saved}
    fewer_bits = any(in_fewer_bits(optimizer) for _, _, optimizer in roles.trained())
    rows = (
        ("a critic", "critic" in parts, roles.critic is not None, "advantage.estimator"),
        ("an optimizer of 8 bits", _in_fewer_bits(saved), fewer_bits, "learner.optimizer"),
        ("an averaged policy", "average" in parts, roles.average is not None, "learner.proximal_ema"),
    )
    for what, there, wanted, key in rows:
        if there != wanted:
            exported = _exported(path, critic="critic" in parts and roles.critic is not None)
            raise CheckpointMismatchError(
                f"{path} was saved {'with' if there else 'without'} {what}, and these settings have "
                f"{'one' if wanted else 'none'}. Resume with the {key} it was trained with"
                + (f", or start a new run with {exported}" if exported else "")
            )


def _in_fewer_bits(saved: Shapes) -> bool:
    return any(name.endswith(MOMENTS[0] + SCALE) for name in saved)


def _exported(path: Path, *, critic: bool) -> str:
    """Settings that start from the exported weights of the run of checkpoint `path`; empty before its last step."""
    run_dir = path.parent.parent
    folders = {"model.path": run_dir / EXPORT_DIR} | ({"critic.path": run_dir / "critic"} if critic else {})
    return " ".join(f"{key}={folder}" for key, folder in folders.items() if folder.is_dir())
