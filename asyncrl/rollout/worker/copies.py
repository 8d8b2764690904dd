"""Compares this machine's copies of tokenizer, rows and code with the learner's."""

from __future__ import annotations

import logging
from typing import Any

from asyncrl.checks.user_code import CODE, rollout_code, workers_code
from asyncrl.data.local_tokenizer import TOKENIZER
from asyncrl.errors import ConfigError
from asyncrl.replay.core.live.workers import OTHER_CODE
from asyncrl.schema import Config
from asyncrl.telemetry.folder.resumed import ROWS, rows_here
from asyncrl.weights.base import SubscriberRendezvous

log = logging.getLogger(__name__)


class SameCopies:
    """A `SubscriberRendezvous` that passes on no weights of a learner with a different tokenizer or different rows; the
    worker then has no weights and is given no work. Differences in other user code are only logged: a file that was
    changed while a worker was restarted is not a mistake of that machine.
    """

    def __init__(self, rendezvous: SubscriberRendezvous, config: Config, tokenizer: str) -> None:
        """
        Args:
            tokenizer: this machine's `tokenizer_digest`.
        """
        self._rendezvous = rendezvous
        data = "data.mixture" if config.data.mixture else f"data.path={config.data.path}"
        self._own = {
            TOKENIZER: (
                tokenizer,
                f"model.path={config.model.path} has another tokenizer or chat template here than on the learner's "
                "machine: the learner would read this worker's samples as other texts, or as answers to other prompts",
            ),
            ROWS: (
                rows_here(config),
                f"{data} has other rows here than on the learner's machine, which a resume would refuse",
            ),
        }
        self._code, self._named = workers_code(config), rollout_code(config)
        self._other: tuple[tuple[str, str, str], ...] = ()
        self.served = rendezvous.served

    def watch(self, revision: int, wait_s: float) -> Any:
        """Raises ConfigError if the learner's tokenizer or rows differ."""
        board = self._rendezvous.watch(revision, wait_s)
        for name, (own, said) in self._own.items():
            theirs = board.values.get(name)
            if theirs and own and theirs != own:
                raise ConfigError(f"{said}. Copy the learner's files to this machine")
        self._hold_code(board.values.get(CODE))
        return board

    def stats(self) -> dict[str, float]:
        return {OTHER_CODE: float(bool(self._other))}

    def _hold_code(self, theirs: Any) -> None:
        """Compare with the code that the learner announces; each difference is logged once."""
        known = theirs if isinstance(theirs, dict) else {}
        other = tuple((key, own, known[key]) for key, own in self._code.items() if known.get(key, own) != own)
        for key, own, there in other if other != self._other else ():
            log.warning(
                "%s=%s, or a file that it imports, is different here (%s) from the one on the learner's machine (%s), "
                "so the run uses two versions of it. Copy the learner's files to this machine and start its pool "
                "again; to change it for all, resume the run",
                *(key, self._named[key], own, there),
            )
        self._other = other
