"""What every machine has its own copy of, held against the learner's."""

from __future__ import annotations

from typing import Any

from asyncrl.data.local_tokenizer import TOKENIZER, tokenizer_digest
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.telemetry.folder.resumed import ROWS, rows_here
from asyncrl.weights.base import SubscriberRendezvous


class SameCopies:
    """A `SubscriberRendezvous` that lets through no weights of a learner with another tokenizer or other rows: a worker
    has none of its weights then, and is given no work."""

    def __init__(self, rendezvous: SubscriberRendezvous, config: Config) -> None:
        self._rendezvous = rendezvous
        data = "data.mixture" if config.data.mixture else f"data.path={config.data.path}"
        self._own = {
            TOKENIZER: (
                tokenizer_digest(config.model.path),
                f"model.path={config.model.path} has another tokenizer or chat template here than where the learner "
                "is: what it samples would be trained on as other texts, or as answers to others",
            ),
            ROWS: (
                rows_here(config),
                f"{data} leads to other rows here than where the learner is, which a resume would refuse",
            ),
        }
        self.served = rendezvous.served

    def watch(self, revision: int, wait_s: float) -> Any:
        """Raises ConfigError."""
        board = self._rendezvous.watch(revision, wait_s)
        for name, (own, said) in self._own.items():
            theirs = board.values.get(name)
            if theirs and own and theirs != own:
                raise ConfigError(f"{said}. Copy the learner's to this machine")
        return board
