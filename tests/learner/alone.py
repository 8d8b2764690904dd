"""Train the learner as it is assembled for a run: one rank in this process, with the test's replay and publisher."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from asyncrl.learner.assembly import assemble
from asyncrl.learner.parallel.place import Place
from asyncrl.learner.processes.stop import Asked, never
from asyncrl.learner.train import Training, train
from asyncrl.schema import Config
from tests.learner.fed_replay import FedReplay, KeptRows, KeptWeights

PLACE = Place(rank=0, world=1, device=torch.device("cpu"), restarted=False, run_id="alone")


def train_alone(
    config: Config, replay: FedReplay, publisher: KeptWeights, *, resume: bool = False, asked: Asked = never
) -> tuple[Training, KeptRows]:
    """Train, and return the parts of the training and the rows of its log."""
    rows = KeptRows()
    with ExitStack() as opened:
        parts = assemble(
            config,
            PLACE,
            opened,
            backend=None,
            replay=replay,
            run_dir=Path(config.run.dir),
            resume="auto" if resume else "never",
            publisher=lambda _: publisher,
            log=lambda _: rows,
        )
        train(config, parts, asked)
    return parts, rows
