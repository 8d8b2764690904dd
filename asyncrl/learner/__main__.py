"""Runs one learner rank: `torchrun ... -m asyncrl.learner key=value ...`. Plain `python -m` is a world of size 1."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from asyncrl import collector

if __name__ == "__main__":
    collector.rest()


from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.machine import check_machine
from asyncrl.checks.parallel import ParallelDims
from asyncrl.checks.permanent import refused_if_permanent
from asyncrl.checks.placement import gpus_seen
from asyncrl.checks.servers import on_to_servers
from asyncrl.config import JOURNAL_DIR, KEYS_DIR, begin_trace, load_config
from asyncrl.data.local_tokenizer import own_tokenizer
from asyncrl.digests import run_digest
from asyncrl.learner.assembly import assemble
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.backends.factory import joined_ranks
from asyncrl.learner.checkpoints.resume import kept_rows
from asyncrl.learner.parallel.place import Place, prepare_process
from asyncrl.learner.processes.launcher import as_rank, to_the_end
from asyncrl.learner.processes.out_of_memory import memory_named
from asyncrl.learner.processes.stop import StopRequest
from asyncrl.learner.publishing.canary import ProvingPublisher
from asyncrl.learner.roles import Roles
from asyncrl.learner.train import Training, train
from asyncrl.placement import LEARNER_SHARE
from asyncrl.plain_text import make_streams_plain
from asyncrl.replay.client.client import LearnerClient
from asyncrl.replay.net.keyring import with_keys
from asyncrl.replay.net.malloc import keep_heap
from asyncrl.schema import Config
from asyncrl.storage.occupancy import lived_in
from asyncrl.telemetry.folder.resumed import load_as_begun
from asyncrl.telemetry.folder.run_folder import begin_settings, changes_in, prepare_run_folder, still_of
from asyncrl.telemetry.folder.tenants import sole_learner
from asyncrl.telemetry.metrics.printed import PrintingLog
from asyncrl.weights.factory import backend_of, make_publisher

log = logging.getLogger("asyncrl.learner")


def main(overrides: Sequence[str]) -> int:
    """Run one rank until training ends. Raises AsyncRLError: a refused setting, or what ended training."""
    return to_the_end(lambda opened: work(overrides, opened))


def work(overrides: Sequence[str], opened: ExitStack) -> None:
    """Join the other ranks and train. Everything that has to be closed is registered with `opened`."""
    config, overrides = load_as_begun(load_config, overrides)
    place = Place.of(os.environ, config.learner.device)
    check_machine(config, "learner")
    begin_trace(config, f"learner {place.rank}")
    config = with_keys(config)
    # Engines that start later on the same GPU need their share of memory free, however much torch would cache.
    share = LEARNER_SHARE if config.placement.mode == "colocated" else 1.0
    level = logging.INFO if place.rank == 0 else logging.WARNING
    prepare_process(place, level, share, lends_memory=config.weights.backend == "ipc")
    keep_heap()  # for the memory of received batches
    if place.rank == 0:
        opened.enter_context(sole_learner(config))
    run(config, place, opened.enter_context(joined_ranks(config, place)), opened, overrides)


def run(config: Config, place: Place, backend: Backend, opened: ExitStack, overrides: Sequence[str]) -> None:
    """Create the parts and train."""
    replay = LearnerClient(
        config.replay.address,
        rank=place.rank,
        run_digest=run_digest(config),
        config=config.replay,
        samples=config.telemetry.samples_per_step,
    )
    opened.callback(replay.close)
    run_dir = Path(config.run.dir).resolve()
    if place.rank == 0:
        for change in changes_in(config, with_dtypes(config, learner=place.device.type)):
            log.warning("this resume changes %s", change)
        keep = (JOURNAL_DIR, KEYS_DIR)
        run_dir = prepare_run_folder(config, place.run_id, keep=keep, overrides=overrides)
    config = with_dtypes(config, learner=place.device.type)
    opened.enter_context(lived_in(run_dir))

    asked = StopRequest(run_dir)
    with memory_named(config, place.rank):
        with refused_if_permanent(f"model.path={config.model.path} cannot be trained with these settings"):
            parts = assembled(config, place, backend, opened, replay, run_dir)
        if place.rank == 0:
            begin_settings(config, {"model.dtype": config.model.dtype, "weights.wire_dtype": config.weights.wire_dtype})
        dims = ParallelDims.of(config.learner, place.world)
        log.info("%d ranks on %s%s, %s, from step %d", place.world, place.device, gpus_seen(), dims, parts.start.step)
        log.info("%s", choices(config, place, parts.roles.policy.layout.value))
        with still_of(place.run_id, run_dir):
            train(config, parts, asked)


def assembled(
    config: Config, place: Place, backend: Backend, opened: ExitStack, replay: LearnerClient, run_dir: Path
) -> Training:
    """See `assemble`."""
    # Read once, for what the workers compare and for the canary; of its vocabulary alone it has tens of megabytes.
    own = own_tokenizer(config.model.path) if place.rank == 0 else None

    def publisher(roles: Roles) -> ProvingPublisher:
        sender = make_publisher(config, replay, run_dir, place.rank, place.device)
        return ProvingPublisher(sender, config, roles.policy, place.device, own)

    return assemble(
        config,
        place,
        opened,
        backend=backend,
        replay=replay,
        run_dir=run_dir,
        resume=config.resume,
        publisher=publisher,
        log=lambda start: PrintingLog.of(
            config,
            run_dir,
            kept_rows(run_dir, start),
            on_alarm=config.telemetry.on_alarm,
            ignored=config.telemetry.ignore_alarms,
        ),
        tokenizer=own,
    )


def choices(config: Config, place: Place, layout: str) -> str:
    """One log line with what each `auto` became on this machine."""
    weights = config.weights
    over = f" over {backend_of(config, place.device)}" if weights.transport == "broadcast" else ""
    return (
        f"computes on {place.device} in {config.model.dtype}, sequences {layout}; weights by {weights.transport}{over} "
        f"in {weights.wire_dtype}{on_to_servers(config.engine)}"
    )


def rank_main(overrides: Sequence[str]) -> int:
    """Run `main` as a process: an error is printed and gives exit code 1."""
    return as_rank(lambda opened: work(overrides, opened), "asyncrl.learner")


if __name__ == "__main__":
    collector.wake()
    make_streams_plain()
    sys.exit(rank_main(sys.argv[1:]))
