"""The composition root of the learner: its parts are created and connected here and nowhere else.

A run (`asyncrl.learner.__main__`), a rerun of it (`asyncrl.cli.rerun`) and the tests pass in what differs between them:
replay, publisher and log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.rules.learner import why_never_warm
from asyncrl.checks.user_code import CODE, workers_code
from asyncrl.config import LOG_DIR
from asyncrl.data.local_tokenizer import TOKENIZER, LocalTokenizer, tokenizer_digest
from asyncrl.digests import learner_digest
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.checkpoints.checkpoint import Checkpoints
from asyncrl.learner.checkpoints.errands import Errands
from asyncrl.learner.checkpoints.resume import Start, begin, highest_version
from asyncrl.learner.checkpoints.sealing import refuse_unshared
from asyncrl.learner.hook import Hook
from asyncrl.learner.model.building import describe_attention
from asyncrl.learner.parallel.collectives import choice_of_rank_zero
from asyncrl.learner.parallel.place import Place
from asyncrl.learner.processes.out_of_memory import heed_note
from asyncrl.learner.roles import Roles, build_roles
from asyncrl.learner.step.accumulation import agree_on_reduction
from asyncrl.learner.train import Training
from asyncrl.learner.user_code_trial import try_own
from asyncrl.replay.protocol import LearnerReplay
from asyncrl.schema import Config
from asyncrl.storage.best import BestCheckpoint
from asyncrl.storage.checkpoints import CHECKPOINT_DIR
from asyncrl.storage.full_disk import BOARD_FILE
from asyncrl.telemetry.folder.resumed import ROWS, rows_here
from asyncrl.telemetry.folder.run_folder import origin_of
from asyncrl.telemetry.metrics.log import MetricsLog
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import Publisher

log_of_start = logging.getLogger(__name__)
CLOSE_WITHIN_S = 60.0
"""Seconds that a running save gets when the learner ends with an error. torchrun kills after 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Where checkpoints are saved, and the one that training starts from."""

    checkpoints: Checkpoints
    restarted: bool
    """Whether this start of the run has already saved a checkpoint or begun its branch (a restart by torchrun)."""
    resume_from: Path | None


def open_checkpoints(config: Config, place: Place, opened: ExitStack, *, run_dir: Path, resume: str) -> Kept:
    """Open the checkpoints of `run_dir`, which all ranks must share, and choose the one to continue from. Collective.

    Args:
        opened: on exit it waits for the running save.
        resume: the setting `resume`.

    Raises:
        RunFolderError: the ranks do not share `run_dir`.
        CheckpointError, ConfigError: see `Checkpoints` and `Errands`.
    """
    refuse_unshared(run_dir, place.rank, place.device)
    heed_note(config, run_dir, place.rank, place.device)
    by, folder = config.learner, run_dir / CHECKPOINT_DIR
    errands = Errands(
        copy_to=by.copy_to,
        export_every=by.export_every,
        within_s=by.save_timeout_s,
        board=run_dir / LOG_DIR / BOARD_FILE,
    )
    checkpoints = Checkpoints(
        folder,
        rank=place.rank,
        keep=by.keep_checkpoints,
        every=by.keep_every,
        best=BestCheckpoint(folder, by.keep_best, by.keep_best_by),
        errands=errands,
        background=by.async_save,
        within_s=by.save_timeout_s,
    )
    opened.callback(checkpoints.close, CLOSE_WITHIN_S)
    restarted = place.restarted or (place.rank == 0 and checkpoints.begun(resume))
    found = checkpoints.choose(resume, restarted) if place.rank == 0 else None
    if place.rank == 0:
        checkpoints.best.begin()
        begins = found is None or resume not in ("auto", "never")  # a new run, or a fork
        if begins and not restarted:  # once started, a run must not end because a target is unreachable for a while
            errands.begin(origin_of(run_dir))
    resume_from = choice_of_rank_zero(found, place.device)
    return Kept(checkpoints=checkpoints, restarted=restarted, resume_from=resume_from)


def settle_how(config: Config, roles: Roles, place: Place, backend: Backend | None) -> None:
    """Settle how the models are computed, and say so. Collective."""
    if place.rank == 0:
        log_of_start.info("attention: %s", describe_attention(roles.policy, config.model))
    agree_on_reduction(roles, config.learner, backend)


def assemble(
    config: Config,
    place: Place,
    opened: ExitStack,
    *,
    backend: Backend | None,
    replay: LearnerReplay,
    run_dir: Path,
    resume: str,
    publisher: Callable[[Roles], Publisher],
    log: Callable[[Start], MetricsLog],
    tokenizer: LocalTokenizer | None = None,
) -> Training:
    """Build the models, load the state that training starts from, then open publisher and log. Collective.

    Args:
        opened: on exit it closes publisher and log.
        backend: shards the models over the ranks; None shards nothing (tests).
        resume: the setting `resume`.
        publisher: makes the publisher of the loaded models.
        log: called on rank 0 only.
        tokenizer: the model's, if it was read already.

    Raises:
        RunFolderError, CheckpointError, ConfigError: see `open_checkpoints` and `build_roles`.
        UserCodeError: a user-defined loss or advantage function cannot be used.
    """
    if place.rank == 0 and (why := why_never_warm(config)):
        log_of_start.warning("%s", why)
    try_own(config.loss, config.advantage, config.learner, place.device)
    kept = open_checkpoints(config, place, opened, run_dir=run_dir, resume=resume)
    roles = build_roles(config, place.device, backend)
    settle_how(config, roles, place, backend)
    if config.learner.hook:
        roles.hook = Hook(config.learner, rank=place.rank, world=place.world)
    known = highest_version(run_dir) if place.rank == 0 else NO_VERSION
    copies: dict[str, Any] = {}
    if place.rank == 0:
        copies = {
            TOKENIZER: tokenizer_digest(config.model.path, tokenizer),
            ROWS: rows_here(config),
            CODE: workers_code(config),
        }
    start = begin(
        replay,
        kept.checkpoints,
        roles,
        kept.resume_from,
        rank=place.rank,
        device=place.device,
        known_version=known,
        settings=learner_digest(with_dtypes(config, learner=place.device.type)),
        branch=resume not in ("auto", "never") and not kept.restarted,
        updates=config.learner.updates_per_batch,
        copies=copies,
        run=origin_of(run_dir),
    )
    sender = publisher(roles)
    opened.push(lambda error, *_: sender.close(failed=error is not None))
    rows = log(start) if place.rank == 0 else None
    if rows is not None:
        opened.callback(rows.close)
    return Training(
        source=replay,
        publisher=sender,
        roles=roles,
        checkpoints=kept.checkpoints,
        start=start,
        log=rows,
        run_dir=run_dir,
        rank=place.rank,
        world=place.world,
        device=place.device,
    )
