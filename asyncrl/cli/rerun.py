"""`asyncrl rerun RUN [key=value ...]`: train the learner again on the batches of a finished run, from its journal.

Without settings the weights come out bit for bit as in the run (same device kind, same number of ranks). With another
loss, advantage, learning rate or staleness bound it shows what that would have made of the same data. Everything is
written to `RUN/rerun-NAME/`. Under torchrun: `torchrun ... -m asyncrl.cli.rerun RUN [key=value ...]`.
"""

from __future__ import annotations

import filecmp
import logging
import os
import re
import sys
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.checks.learner import early_groups
from asyncrl.checks.parallel import ParallelDims
from asyncrl.cli.commands import written
from asyncrl.config import JOURNAL_DIR, config_groups, config_to_dict, disk_patience, load_config, read_config
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.learner.assembly import assemble
from asyncrl.learner.counterfactual import Probe
from asyncrl.learner.place import Place, joined_ranks, prepare_process
from asyncrl.learner.ranks import barrier
from asyncrl.learner.roles import Roles
from asyncrl.learner.train import train
from asyncrl.plain_text import make_streams_plain
from asyncrl.replay.audit.rerun import RetainedReplay, read_surviving
from asyncrl.schema import Config
from asyncrl.telemetry.metrics import MetricsLog
from asyncrl.telemetry.report import read_metrics
from asyncrl.telemetry.rerun_report import comparison, plot_comparison
from asyncrl.telemetry.resumed import changed_code, is_supervised
from asyncrl.telemetry.run_folder import prepare_run_folder

FREE = ("loss", "advantage", "critic", "reference", "learner", "replay.max_staleness", "overwrite")
"""What a rerun may set: the data is what it is."""
FIXED = ("learner.groups_per_step", "learner.ranks")
LEARNED_BY = ("loss", "advantage", "critic", "reference")
"""Rooms of the settings that say what is minimised."""
OF_A_RERUN = (
    *("learner.save_every", "learner.early_groups"),
    *("learner.replicas", "learner.sequence_parallel", "learner.tensor_parallel"),
)
"""Set by `rerun_config`, and without a say in what is learned."""
UNCHANGED = (
    "though no setting of the learner is another. On a CPU, with the same versions of asyncrl and torch, number of "
    "ranks and kind of CPU, they are the same bits; on a GPU its kernels round as they please"
)
LONGEST_NAME = 58
"""After `rerun-`, of a run's 64 letters."""
LEFT_OUT = ("run", "resume", "overwrite", "engine", "replay", "eval", "telemetry", "ray", "weights", "experiment")
"""Recorded settings of parts that a rerun has not got; their defaults stand in."""


def main(run: Path, overrides: Sequence[str]) -> int:
    """Train again and print both curves.

    Raises:
        AsyncRLError: there is no whole journal, or a setting that the data does not leave open.
    """
    config = rerun_config(run, overrides)
    for change in changed_code(config, run):
        print(f"not what the run was trained with: {change}")
    place = Place.of(os.environ, config.learner.device)
    prepare_process(place, logging.WARNING)
    with joined_ranks(config, place) as mesh, ExitStack() as opened:
        train_again(config, run / JOURNAL_DIR, place, mesh, opened)
    if place.rank == 0:
        report(run, Path(config.run.dir), changed_by(config, read_config(run / "config.yaml")))
    return 0


def rerun_config(run: Path, overrides: Sequence[str]) -> Config:
    """The settings of the run with `overrides`, for a learner alone.

    Raises:
        ConfigError: there is no run, or an override that the data does not leave open.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.yaml")
    if is_supervised(run):
        raise ConfigError(
            f"{run} is a run of asyncrl sft: it has no batches of rollouts to train on again. Start it with another "
            "run.name to compare"
        )
    for text in overrides:
        key = text.partition("=")[0]
        if key in FIXED or not any(key == name or key.startswith(f"{name}.") for name in FREE):
            raise ConfigError(f"a rerun cannot set {key}: its data was made without it. It can set {', '.join(FREE)}")
    recorded = read_config(run / "config.yaml")
    groups = {text.partition("=")[0] for text in overrides} & set(config_groups())
    # Recorded with every part of its preset: those of another one would be refused beside it.
    groups |= {"loss"} if any(text.startswith("loss.preset=") for text in overrides) else set()
    settings = flat({k: v for k, v in config_to_dict(recorded).items() if k not in (*LEFT_OUT, *groups)})
    settings |= {
        "run.name": f"rerun-{name_of(overrides)}",
        "run.dir": str(run.resolve() / f"rerun-{name_of(overrides)}"),
        "engine.record_topk": recorded.engine.record_topk,
        **({"engine.exact": True, "weights.on_update": "recompute"} if recorded.engine.exact else {}),
        "replay.max_staleness": recorded.replay.max_staleness,
        "replay.pipeline_depth": 0,
        "learner.early_groups": early_groups(recorded),  # the run's replay, which is not here, may have forbidden it
        "learner.replicas": 1,  # this and the next two of ranks that a rerun need not have
        "learner.sequence_parallel": 1,
        "learner.tensor_parallel": 1,
    }
    config = load_config([*(f"{key}={written(value)}" for key, value in settings.items()), *overrides])
    config.learner.save_every = 0  # nothing to resume, and nobody to commit to
    return config


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"loss.clip": ...}` of nested dictionaries."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, dict)
        result |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return result


def name_of(overrides: Sequence[str]) -> str:
    """Of the rerun's folder, from what is different in it."""
    different = [text for text in overrides if not text.startswith("overwrite=")]
    name = re.sub(r"[^A-Za-z0-9.=]+", "-", "-".join(different)).replace("=", "-") or "same"
    if len(name) <= LONGEST_NAME:
        return name
    # A path is soon longer than a name may be, and two of them may begin alike.
    return f"{name[: LONGEST_NAME - 9]}-{zlib.crc32(name.encode()):08x}"


def train_again(config: Config, journal: Path, place: Place, mesh: DeviceMesh, opened: ExitStack) -> None:
    history = read_surviving(journal)
    if len(history.steps) < config.learner.steps:
        raise ConfigError(
            f"the journal has {len(history.steps)} trained steps: set learner.steps={len(history.steps)} at most (a "
            "schedule that ends at learner.steps then ends earlier than in the run)"
        )
    replay = RetainedReplay(
        journal,
        history,
        max_staleness=config.replay.max_staleness,
        updates=config.learner.updates_per_batch,
        early=early_groups(config),
    )
    opened.callback(replay.close)
    run_dir = Path(config.run.dir)
    if place.rank == 0:
        prepare_run_folder(config, place.run_id)
    barrier()

    def probe(roles: Roles) -> Probe:
        dims = ParallelDims.of(config.learner, place.world)
        shard = dims.data_rank(place.rank)
        return Probe(config, roles.policy, replay, rank=shard, world=dims.data, device=place.device)

    parts = assemble(
        config,
        place,
        opened,
        mesh=mesh,
        replay=replay,
        run_dir=run_dir,
        resume="never",
        publisher=probe,
        log=lambda _: MetricsLog(run_dir, config.run.name, {}, False, False, None, disk_patience(config)),
    )
    train(config, parts)


def changed_by(config: Config, recorded: Config) -> list[str]:
    """Settings that decide what is learned and are not those of the run."""
    ours, theirs = (flat(config_to_dict(each)) for each in (config, recorded))
    rooms = tuple(f"{room}." for room in (*LEARNED_BY, "learner"))
    keys = [key for key in ours if key.startswith(rooms) or key == "replay.max_staleness"]
    return [key for key in keys if key not in OF_A_RERUN and ours[key] != theirs.get(key)]


def weights_apart(run: Path, again: Path) -> float:
    """Norm of the difference of two exports over that of the first, one tensor after the other. Raises AsyncRLError:
    they have other tensors."""
    ours, theirs = (
        {name: file for file in sorted(folder.glob("*.safetensors")) for name in names_in(file)}
        for folder in (run, again)
    )
    if ours.keys() != theirs.keys():
        raise AsyncRLError(f"{run} and {again} have other tensors: they are models of different shape")
    apart = size = 0.0
    for name, file in ours.items():
        one, other = (tensor_of(each, name) for each in (file, theirs[name]))
        apart += float((one - other).square().sum())
        size += float(one.square().sum())
    return (apart / size) ** 0.5 if size else 0.0


def names_in(file: Path) -> list[str]:
    with safe_open(str(file), framework="pt") as opened:
        return list(opened.keys())


def tensor_of(file: Path, name: str) -> torch.Tensor:
    with safe_open(str(file), framework="pt") as opened:
        return opened.get_tensor(name).double()


def report(run: Path, folder: Path, changed: Sequence[str]) -> None:
    """Both curves, side by side, and whether the weights are the run's.

    Args:
        changed: see `changed_by`.
    """
    original, again = read_metrics(run), read_metrics(folder)
    same_loss = not any(key.startswith(tuple(f"{room}." for room in LEARNED_BY)) for key in changed)
    print(comparison(original, again, same_loss=same_loss))
    plot_comparison(original, again, folder / "curves.png", folder.name)
    print(f"written to {folder}: metrics.jsonl, curves.png, hf/")
    files = [file.name for file in sorted((run / "hf").glob("*.safetensors"))]
    if not files:
        print("the run has no hf/*.safetensors to compare with")
    elif filecmp.cmpfiles(run / "hf", folder / "hf", files, shallow=False)[0] == files:
        print("final weights: those of the run, bit for bit")
    else:
        why = f"with other {', '.join(changed)}" if changed else UNCHANGED
        print(f"final weights: others than the run's, {weights_apart(run / 'hf', folder / 'hf'):.2%} apart, {why}")


if __name__ == "__main__":
    make_streams_plain()
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
    except AsyncRLError as error:
        print(f"asyncrl.cli.rerun: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
