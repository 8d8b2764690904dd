"""One rank of `asyncrl sft`: `torchrun ... -m asyncrl.sft key=value ...`; plain `python -m` is a world of one."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from asyncrl import collector

if __name__ == "__main__":
    collector.rest()

from asyncrl.checks.dtypes import dtype_on, recomputed_on
from asyncrl.checks.permanent import refused_if_permanent
from asyncrl.config import begin_trace
from asyncrl.learner.backends.factory import joined_ranks
from asyncrl.learner.checkpoints.resume import Start
from asyncrl.learner.parallel.place import Place, prepare_process
from asyncrl.learner.processes.launcher import as_rank
from asyncrl.learner.processes.out_of_memory import memory_named
from asyncrl.learner.processes.stop import StopRequest
from asyncrl.plain_text import make_streams_plain
from asyncrl.sft.assembly import assemble
from asyncrl.sft.rules import check_sft_machine, load_sft
from asyncrl.sft.settings import SftConfig, learner_config
from asyncrl.sft.train import train_rows
from asyncrl.storage.occupancy import lived_in
from asyncrl.telemetry.folder.resumed import load_as_begun
from asyncrl.telemetry.folder.run_folder import begin_settings, changes_in, prepare_run_folder, still_of
from asyncrl.telemetry.folder.tenants import sole_learner
from asyncrl.telemetry.metrics.log import METRICS_FILE
from asyncrl.telemetry.metrics.printed import PrintingLog

log = logging.getLogger("asyncrl.sft")


def work(overrides: Sequence[str], opened: ExitStack) -> None:
    """Join the other ranks and train. Resources to be closed are added to `opened`.

    Raises:
        AsyncRLError: a setting or row was refused, or training failed.
    """
    given, overrides = load_as_begun(load_sft, overrides)
    config = learner_config(given)
    place = Place.of(os.environ, given.learner.device)
    check_sft_machine(given, alone=False)
    begin_trace(config, f"learner {place.rank}")
    prepare_process(place, logging.INFO if place.rank == 0 else logging.WARNING)
    if place.rank == 0:
        opened.enter_context(sole_learner(given))
    backend = opened.enter_context(joined_ranks(config, place))
    run_dir = Path(given.run.dir).resolve()
    dtype = dtype_on(given.model.dtype, place.device.type)
    if place.rank == 0:
        for change in changes_in(given, replace(given, model=replace(given.model, dtype=dtype))):
            log.warning("this resume changes %s", change)
        run_dir = prepare_run_folder(given, place.run_id, overrides=overrides)
    recomputed = recomputed_on(given.model.activation_checkpointing, place.device.type)
    given = replace(given, model=replace(given.model, activation_checkpointing=recomputed))
    opened.enter_context(lived_in(run_dir))
    asked = StopRequest(run_dir)
    with memory_named(config, place.rank):
        with refused_if_permanent(f"model.path={given.model.path} cannot be trained with these settings"):
            parts = assemble(
                given,
                place,
                opened,
                backend=backend,
                run_dir=run_dir,
                log=lambda start: open_log(given, run_dir, start),
            )
        if place.rank == 0:
            begin_settings(given, {"model.dtype": dtype})
        log.info(
            "%d ranks on %s, from step %d of %d",
            place.world,
            place.device,
            parts.start.step,
            parts.config.learner.steps,
        )
        with still_of(place.run_id, run_dir):
            train_rows(parts, asked)


def open_log(given: SftConfig, run_dir: Path, start: Start) -> PrintingLog:
    """Open the metrics files of the run, truncated to the checkpoint that training resumes from."""
    if start.step == 0:  # a start that saved nothing evaluated the first weights: this is repeated
        (run_dir / METRICS_FILE).unlink(missing_ok=True)
    return PrintingLog.of(given, run_dir, start.step)


def main(overrides: Sequence[str]) -> int:
    """Run one rank to the end of training, as a process: print an error and return exit code 1 if it fails."""
    return as_rank(lambda opened: work(overrides, opened), "asyncrl.sft")


if __name__ == "__main__":
    collector.wake()
    make_streams_plain()
    sys.exit(main(sys.argv[1:]))
