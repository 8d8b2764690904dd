"""`asyncrl rerun RUN [key=value ...]`: trains the learner again on the batches of a finished run, from its journal.

Without settings, the weights equal the run's bit for bit (on the same kind of device, with the same number and layout
of ranks, which it starts itself). With another loss, advantage, learning rate or staleness bound, it shows what that
would have learned from the same data. Everything is written to `RUN/rerun-NAME/`. On several machines, use your own
torchrun: `torchrun ... -m asyncrl.cli.rerun RUN [key=value ...]`.

waits for: the ranks, which bound every wait of their own · unblocked by: their end, Ctrl-C, SIGTERM or SIGHUP
"""

from __future__ import annotations

import filecmp
import logging
import os
import re
import sys
import time
import uuid
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open

from asyncrl.checks.override_syntax import written
from asyncrl.checks.parallel import LAID_OUT_BY, ParallelDims, problem_of
from asyncrl.checks.rules.switches import without_effect
from asyncrl.cli.processes.commands import learner_command
from asyncrl.cli.processes.supervision import TURN_S, show_failure
from asyncrl.cli.processes.supervisor import Supervisor
from asyncrl.config import (
    JOURNAL_DIR,
    LOG_DIR,
    by_key,
    config_groups,
    config_to_dict,
    literal,
    load_config,
    read_config,
)
from asyncrl.errors import AsyncRLError, ConfigError, RunFolderError
from asyncrl.learner.assembly import assemble
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.backends.factory import joined_ranks
from asyncrl.learner.parallel.collectives import barrier
from asyncrl.learner.parallel.place import Place, prepare_process
from asyncrl.learner.processes.launcher import as_rank, to_the_end
from asyncrl.learner.roles import Roles
from asyncrl.learner.step.counterfactual import Probe
from asyncrl.learner.train import train
from asyncrl.plain_text import make_streams_plain
from asyncrl.replay.audit.rerun import History, RetainedReplay, read_surviving
from asyncrl.schema import Config
from asyncrl.storage.checkpoints import EXPORT_DIR
from asyncrl.telemetry.folder.resumed import CONFIG_FILE, changed_code, is_supervised
from asyncrl.telemetry.folder.run_folder import owner_of, prepare_run_folder
from asyncrl.telemetry.live.console import PlainConsole
from asyncrl.telemetry.metrics.log import MetricsLog
from asyncrl.telemetry.reports.rerun import comparison, plot_comparison
from asyncrl.telemetry.reports.summary import read_metrics

FREE = ("loss", "advantage", "critic", "reference", "learner", "model.compile", "replay.max_staleness", "overwrite")
"""Settings that a rerun may change; all others belong to the recorded data."""
FIXED = ("learner.groups_per_step",)
LEARNED_BY = ("loss", "advantage", "critic", "reference")
"""Sections of the settings that determine what is minimised."""
OF_A_RERUN = (
    *("learner.save_every", "learner.max_restarts", "learner.copy_to"),
    *("learner.keep_best", "learner.keep_best_by", "learner.profile"),
)
"""Settings that `rerun_config` changes and that do not affect what is learned."""
UNCHANGED = (
    "although no setting of the learner differs. On a CPU, with the same versions of asyncrl and torch, number of "
    "ranks (if you started torchrun yourself, start the rerun with it too) and kind of CPU, the weights are equal bit "
    "for bit. On a GPU, rounding differs between runs"
)
LONGEST_NAME = 58
"""Limit on the characters after `rerun-`; a run's name has at most 64."""
LEFT_OUT = ("run", "resume", "overwrite", "engine", "replay", "eval", "telemetry", "ray", "weights", "experiment")
"""Recorded settings of parts that a rerun does not have; their defaults are used instead."""


def main(run: Path, overrides: Sequence[str]) -> int:
    """Train again, on as many ranks as the run, and print both curves.

    Raises:
        AsyncRLError: the journal is incomplete, or a setting cannot be changed for recorded data.
    """
    config = rerun_config(run, overrides)
    if config.learner.ranks > 1 and "WORLD_SIZE" not in os.environ:
        history_for(config, run / JOURNAL_DIR)  # checked first: refused by the ranks, it would leave a folder
        return on_ranks(config, run, overrides)
    return to_the_end(lambda opened: work(run, overrides, opened))


def on_ranks(config: Config, run: Path, overrides: Sequence[str]) -> int:
    """Start the ranks and print their output. Exit code: 0, 1 if one failed, 128 + a signal's number."""
    run_id = uuid.uuid4().hex[:12]
    folder = prepare(config, run_id)  # first, since the log is written into it
    command = learner_command(config, [str(run.resolve()), *overrides], run_id, "asyncrl.cli.rerun")
    print(f"training again on {config.learner.ranks} ranks; their log: {folder / LOG_DIR / 'learner.log'}", flush=True)
    with Supervisor(folder / LOG_DIR) as supervisor:
        ranks = supervisor.start(command.role, command.arguments, command.environment)
        while ranks.code is None and not supervisor.signal:
            supervisor.observe()
            time.sleep(TURN_S)
    if supervisor.signal:
        return 128 + supervisor.signal
    if ranks.failed:
        show_failure(ranks, PlainConsole())
        return 1
    print(ranks.log.read_text(errors="replace"), end="")
    return 0


def work(run: Path, overrides: Sequence[str], opened: ExitStack) -> None:
    config = rerun_config(run, overrides)
    place = Place.of(os.environ, config.learner.device)
    prepare_process(place, logging.WARNING)
    if place.rank == 0:
        for change in changed_code(config, run):
            print(f"differs from the settings of the run: {change}")
    with joined_ranks(config, place) as backend, ExitStack() as parts:
        train_again(config, run / JOURNAL_DIR, place, backend, parts)
    if place.rank == 0:
        report(run, Path(config.run.dir), changed_by(config, read_config(run / CONFIG_FILE)))


def rerun_config(run: Path, overrides: Sequence[str]) -> Config:
    """Return the settings of the run with `overrides`, for a learner alone.

    Raises:
        ConfigError: there is no run, or an override cannot be applied to recorded data.
    """
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(f"{run} is not a run folder: it has no {CONFIG_FILE}")
    if is_supervised(run):
        raise ConfigError(
            f"{run} is a run of asyncrl sft, which has no rollouts to train on again. Start asyncrl sft with another "
            "run.name to compare"
        )
    for text in overrides:
        key = text.partition("=")[0]
        if key in FIXED or not any(key == name or key.startswith(f"{name}.") for name in FREE):
            raise ConfigError(
                f"a rerun cannot set {key}, because the run's data was generated without it. It can set "
                f"{', '.join(FREE)}"
            )
    recorded = read_config(run / CONFIG_FILE)
    groups = {text.partition("=")[0] for text in overrides} & set(config_groups())
    # A loss is recorded with all parts of its preset, which would be refused together with another preset.
    groups |= {"loss"} if any(text.startswith("loss.preset=") for text in overrides) else set()
    settings = flat({k: v for k, v in config_to_dict(recorded).items() if k not in (*LEFT_OUT, *groups)})
    idle = without_effect(settings)
    settings = {key: value for key, value in settings.items() if key not in idle}
    settings |= {
        "run.name": f"rerun-{name_of(overrides)}",
        "run.dir": str(run.resolve() / f"rerun-{name_of(overrides)}"),
        "engine.record_topk": recorded.engine.record_topk,
        "replay.max_staleness": recorded.replay.max_staleness,
        "replay.pipeline_depth": 0,
        "replay.max_bytes": recorded.replay.max_bytes,  # the default may be too small for the batches
        "learner.max_restarts": 0,  # there are no checkpoints to resume from
        "learner.copy_to": "",  # it has the run's own copies
        "learner.keep_best": "",  # nothing is evaluated
        "learner.keep_best_by": "max",
        "learner.profile": "",  # it slows steps down, and may name steps that a shorter rerun lacks
    }
    if problem_of(recorded.learner, ranks_of(overrides, recorded)):
        settings |= {f"learner.{name}": 1 for name in LAID_OUT_BY}
    config = load_config([*(f"{key}={written(literal(value))}" for key, value in settings.items()), *overrides])
    config.learner.save_every = 0  # a rerun is not resumed, and there is no replay server for commits
    return config


def ranks_of(overrides: Sequence[str], recorded: Config) -> int:
    """Return the number of ranks that torchrun has started, or that will be started."""
    asked = [value for key, _, value in (text.partition("=") for text in overrides) if key == "learner.ranks"]
    said = os.environ.get("WORLD_SIZE") or (asked[-1] if asked else "")
    return int(said) if said.isdecimal() else recorded.learner.ranks


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key, `{"loss.clip": ...}`, without empty mappings."""
    return {key: value for key, value in by_key(values, apart=True).items() if value != {}}


def name_of(overrides: Sequence[str]) -> str:
    """Return a name for the rerun's folder, from the changed settings."""
    different = [text for text in overrides if not text.startswith("overwrite=")]
    name = re.sub(r"[^A-Za-z0-9.=]+", "-", "-".join(different)).replace("=", "-") or "same"
    if len(name) <= LONGEST_NAME:
        return name
    # A path may exceed the limit, and two may have the same beginning: add a checksum.
    return f"{name[: LONGEST_NAME - 9]}-{zlib.crc32(name.encode()):08x}"


def history_for(config: Config, journal: Path) -> History:
    """Raises AsyncRLError: the journal is incomplete, or has fewer steps than are to be trained."""
    history = read_surviving(journal)
    if len(history.steps) < config.learner.steps:
        raise ConfigError(
            f"the journal has {len(history.steps)} trained steps. Set learner.steps={len(history.steps)} or less (a "
            "schedule that ends at learner.steps then ends earlier than in the run)"
        )
    return history


def prepare(config: Config, run_id: str) -> Path:
    """Prepare the folder of the rerun and return it.

    Raises:
        RunFolderError: it already holds a rerun, which is checked here because the advice of `prepare_run_folder` does
            not apply; or see there.
    """
    if owner_of(Path(config.run.dir).resolve()) not in (None, run_id) and not config.overwrite:
        raise RunFolderError(f"{config.run.dir} already holds this rerun. To train it again, add overwrite=true")
    return prepare_run_folder(config, run_id)


def train_again(config: Config, journal: Path, place: Place, backend: Backend, opened: ExitStack) -> None:
    history = history_for(config, journal)
    replay = RetainedReplay(
        journal,
        history,
        max_staleness=config.replay.max_staleness,
        samples=config.telemetry.samples_per_step,
        updates=config.learner.updates_per_batch,
    )
    opened.callback(replay.close)
    run_dir = Path(config.run.dir)
    if place.rank == 0:
        prepare(config, place.run_id)
    barrier()

    def probe(roles: Roles) -> Probe:
        dims = ParallelDims.of(config.learner, place.world)
        shard = dims.data_rank(place.rank)
        return Probe(config, roles.policy, replay, rank=shard, world=dims.data, device=place.device)

    parts = assemble(
        config,
        place,
        opened,
        backend=backend,
        replay=replay,
        run_dir=run_dir,
        resume="never",
        publisher=probe,
        log=lambda _: MetricsLog(run_dir, config.run.name, {}, False, False, None),
    )
    train(config, parts)


def changed_by(config: Config, recorded: Config) -> list[str]:
    """Return the settings that affect the learned weights, even if only by rounding, and differ from the run's."""
    ours, theirs = (flat(config_to_dict(each)) for each in (config, recorded))
    rooms = tuple(f"{room}." for room in (*LEARNED_BY, "learner"))
    keys = [key for key in ours if key.startswith(rooms) or key in ("model.compile", "replay.max_staleness")]
    return [key for key in keys if key not in OF_A_RERUN and ours[key] != theirs.get(key)]


def weights_apart(run: Path, again: Path) -> float:
    """Return the norm of the difference of two exports, divided by that of the first, read tensor by tensor. Raises
    AsyncRLError: their tensors have different names."""
    with ExitStack() as opened:
        ours, theirs = (
            {
                name: file
                for path in sorted(folder.glob("*.safetensors"))
                for file in [opened.enter_context(safe_open(str(path), framework="pt"))]
                for name in file.keys()  # noqa: SIM118 (not a dict)
            }
            for folder in (run, again)
        )
        if ours.keys() != theirs.keys():
            raise AsyncRLError(f"{run} and {again} have different tensors, so they are models of different shapes")
        apart = size = 0.0
        for name in ours:
            one, other = (each[name].get_tensor(name).double() for each in (ours, theirs))
            apart += float((one - other).square().sum())
            size += float(one.square().sum())
    return (apart / size) ** 0.5 if size else 0.0


def report(run: Path, folder: Path, changed: Sequence[str]) -> None:
    """Print both curves side by side, and whether the weights equal the run's.

    Args:
        changed: see `changed_by`.
    """
    original, again = read_metrics(run), read_metrics(folder)
    same_loss = not any(key.startswith(tuple(f"{room}." for room in LEARNED_BY)) for key in changed)
    print(comparison(original, again, same_loss=same_loss))
    plot_comparison(original, again, folder / "curves.png", folder.name)
    print(f"written to {folder}: metrics.jsonl, curves.png, hf/")
    files = [file.name for file in sorted((run / EXPORT_DIR).glob("*.safetensors"))]
    if not files:
        print("the run has no hf/*.safetensors to compare with")
    elif filecmp.cmpfiles(run / EXPORT_DIR, folder / EXPORT_DIR, files, shallow=False)[0] == files:
        print("final weights: equal to those of the run, bit for bit")
    else:
        why = f"with other {', '.join(changed)}" if changed else UNCHANGED
        apart = 100 * weights_apart(run / EXPORT_DIR, folder / EXPORT_DIR)
        print(f"final weights: different from the run's, {apart:.2g}% apart, {why}")


if __name__ == "__main__":
    make_streams_plain()
    sys.exit(as_rank(lambda opened: work(Path(sys.argv[1]), sys.argv[2:], opened), "asyncrl.cli.rerun"))
