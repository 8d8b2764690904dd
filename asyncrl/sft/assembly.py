"""The composition root of supervised fine-tuning: the only place where its parts are constructed and connected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from asyncrl.data.dataset import Dataset
from asyncrl.errors import DataError, OverlongError
from asyncrl.learner.assembly import open_checkpoints, settle_how
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.checkpoints.resume import Start
from asyncrl.learner.model.policy import build_model
from asyncrl.learner.optimizer.update import make_optimizer
from asyncrl.learner.parallel.place import Place
from asyncrl.learner.roles import Roles
from asyncrl.sft.batches import Course, RowBatches, draws_before
from asyncrl.sft.examples import Encoder, Example, Examples, open_encoder
from asyncrl.sft.rows import SftRows, eval_source, train_sources
from asyncrl.sft.settings import SftConfig, learner_config
from asyncrl.sft.train import SftTraining, resumed
from asyncrl.telemetry.metrics.log import MetricsLog


def assemble(
    given: SftConfig,
    place: Place,
    opened: ExitStack,
    *,
    backend: Backend | None,
    run_dir: Path,
    log: Callable[[Start], MetricsLog],
) -> SftTraining:
    """Open the rows, build the model, resume if there is a checkpoint, then open the log. Collective.

    Args:
        opened: receives what has to be closed.
        backend: of the ranks; None if nothing is sharded (tests).
        log: called on rank 0 alone.

    Raises:
        RunFolderError, CheckpointError, ConfigError, DataError: see `open_checkpoints`, `build_model` and `SftRows`.
    """
    config, by = learner_config(given), given.learner
    kept = open_checkpoints(config, place, opened, run_dir=run_dir, resume=given.resume)
    encoder = open_encoder(given)
    rows = [SftRows(source, given.data) for source in train_sources(given)]
    data = Dataset(rows, given.data.order_by)
    opened.callback(data.close)
    held_out = held_out_examples(given, encoder)
    policy = build_model(config, place.device, backend)
    roles = Roles(policy=policy, optimizer=make_optimizer(policy.parameters(), config.learner))
    settle_how(config, roles, place, backend)
    draw = draws_before(kept.resume_from)
    start = resumed(kept.checkpoints, roles, kept.resume_from)
    course = Course.of(len(data), by.rows_per_step, by.epochs, by.steps, step=start.step, draw=draw)
    written = log(start) if place.rank == 0 else None
    if written is not None:
        opened.callback(written.close)
    return SftTraining(
        config=replace(config, learner=replace(config.learner, steps=course.steps)),
        eval=given.eval,
        roles=roles,
        checkpoints=kept.checkpoints,
        start=start,
        source=RowBatches(Examples(rows, encoder), data.order(seed=given.seed, shuffle=given.data.shuffle), course),
        held_out=held_out,
        log=written,
        run_dir=run_dir,
        rank=place.rank,
        world=place.world,
        device=place.device,
    )


def held_out_examples(given: SftConfig, encoder: Encoder) -> Sequence[Example]:
    """The examples of `eval.path`, in order, without those dropped as overlong; empty if nothing is evaluated.

    Raises:
        DataError: a row cannot be used, or all are too long.
    """
    source = eval_source(given)
    if source is None:
        return ()
    rows = SftRows(source, given.data)
    found: list[Example] = []
    for row in range(min(len(rows), given.eval.rows or len(rows))):
        try:
            found.append(encoder.example(rows.form(row), rows.where(row)))
        except OverlongError:
            continue
    rows.close()
    if not found:
        raise DataError(
            f"eval.path={given.eval.path}: all rows have more than data.max_tokens={given.data.max_tokens} tokens. "
            "Raise it, or leave eval.path out"
        )
    return found
