"""Checkpoints: models, optimizers, counters and the replay server's snapshot, committed atomically.

ckpt/step_50/   __0_0.distcp ... .metadata    models and optimizers (torch DCP; any number of ranks can load it)
                state.json                    step, policy_version, counters
                base.json                     with LoRA: the weights that the adapters belong to
                replay.msgpack                what an empty replay server needs to continue
                manifest.json                 sizes and hashes; written last
ckpt/latest     -> step_50                    moved once step_50 is complete
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.errors import (
    AsyncRLError,
    CheckpointDamagedError,
    CheckpointError,
    DiskFullError,
    RunFolderError,
)
from asyncrl.learner.checkpoints.errands import Errands
from asyncrl.learner.checkpoints.saving import HOST, BackgroundSave, HostCopy, own_group
from asyncrl.learner.checkpoints.sealing import prove_own
from asyncrl.learner.checkpoints.state import LearnerState, read_state, refuse_stranger
from asyncrl.learner.checkpoints.tensors import fill, tensors_of
from asyncrl.learner.checkpoints.writing import said_of, write_tensors
from asyncrl.learner.model.lora import check_base, write_base
from asyncrl.learner.parallel.collectives import barrier, however_long, text_of_rank_zero
from asyncrl.learner.processes.launcher import ADVANCED, tell
from asyncrl.learner.roles import Roles
from asyncrl.storage import sealed
from asyncrl.storage.best import BestCheckpoint
from asyncrl.storage.checkpoints import (
    LATEST,
    REPLAY_FILE,
    STATE_FILE,
    begin_branch,
    branch_begun,
    newest,
    newest_whole,
    prune,
    put_aside,
    refuse_bare_fork,
)
from asyncrl.storage.full_disk import disk_space
from asyncrl.telemetry.folder.run_folder import origin_of, owner_of

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves to and loads from one folder. `save`, `begin` and `load` are collective over the learner ranks."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        keep: int,
        every: int = 0,
        best: BestCheckpoint | None = None,
        errands: Errands | None = None,
        background: bool = False,
        within_s: float = 3600.0,
    ) -> None:
        """With `background`, saves run during training, see `begin`.

        Args:
            keep: number of newest checkpoints to keep.
            every: also keep checkpoints at multiples of this many steps, for good; 0 is none.
            within_s: limit on the seconds that a save may take.
        """
        self._folder, self._rank, self._keep, self._every = folder, rank, keep, every
        self.best = best or BestCheckpoint(folder)
        self._errands = errands or Errands()
        self._run = origin_of(folder.parent)
        self._branch: tuple[Path, str, str] | None = None
        """A branch that is to begin: from which checkpoint, by which `resume`, in which start of the run."""
        self._background, self._within_s = background, within_s
        self._under_way = BackgroundSave(self._within_s)
        self._copy = HostCopy()
        self._group, self._grouped = None, False
        self._saved: list[int] = []
        """Steps with complete checkpoints."""
        self._held_back: set[int] = set()
        """Ids of the optimizers that wait for the copy."""

    def save(self, state: LearnerState, roles: Roles, snapshot: dict[str, Any]) -> Path:
        """Write the checkpoint of `state`; on return it is durable and visible to every rank. See `begin`."""
        self.begin(state, roles, snapshot)
        self.finish()
        return self._folder / f"step_{state.step + 1}"

    def begin(self, state: LearnerState, roles: Roles, snapshot: dict[str, Any]) -> None:
        """Start to write the checkpoint of `state`, once the previous one is complete. `saved` reports completion.

        In the background, steps may follow at once: the optimizers wait until weights and moments are copied to host
        memory. Otherwise this returns when the checkpoint is complete.

        Args:
            snapshot: of the replay server; read on rank 0.

        Raises:
            CheckpointError: this one, or the previous one, could not be written (permissions, a broken disk). Earlier
                checkpoints are untouched.
            DiskFullError: there was no space.
            RunFolderError: the folder belongs to another run by now.
        """
        self.finish()
        target = self._folder / f"step_{state.step + 1}"
        if self._rank == 0:
            self._refuse_takeover()
            self.best.saving(state.step + 1)
        if not self._grouped:
            self._group, self._grouped = own_group(self._within_s), True
        self._hold_back(roles)
        kept = {"tensors": tensors_of(roles)}
        packed = msgpack.Packer().pack(snapshot)

        def copied() -> None:
            if self._background:
                kept["tensors"] = self._copy.take(kept["tensors"])

        def write() -> None:
            self._write(target, replace(state, run=self._run), roles, kept.pop("tensors"), packed)
            self._saved.append(state.step)
            tell(ADVANCED)

        self._under_way.start(f"checkpoint {target}", copied, write, roles.policy.device)
        if not self._background:
            self.finish()

    def saved(self) -> list[int]:
        """Steps whose checkpoints became durable since the last call. Raises as `begin`."""
        if not self._under_way.busy:
            self.finish()
        done, self._saved = self._saved, []
        return done

    def finish(self) -> None:
        """Wait until the running save is durable. Raises as `begin`."""
        self._under_way.finish()

    def close(self, within_s: float) -> None:
        """Wait at most `within_s` for the running save, when the learner ends for any reason. Never raises."""
        try:
            self._under_way.finish(within_s)
        except (AsyncRLError, OSError) as error:
            log.warning("the last checkpoint is incomplete; a resume continues from the one before: %s", error)

    def timings(self) -> dict[str, float]:
        """`checkpoint/*` metrics since the last call."""
        return self._under_way.timings() | self._errands.counts()

    def finish_errands(self, within_s: float = math.inf) -> None:
        """At the end of a run, after the last save: wait for copies and exports, for a limited time, and delete the old
        checkpoints that were kept for them."""
        if self._rank == 0:
            self._errands.finish(min(within_s, self._within_s))
            if origin_of(self._folder.parent) != self._run:  # after `overwrite=true`, they are another run's
                return
            with contextlib.suppress(OSError):  # the next save deletes them, if a run goes on from here
                self._remove_old()

    def _hold_back(self, roles: Roles) -> None:
        """Make steps wait for the copy. The wait is in the optimizer itself, so that no caller can forget it."""
        for _, _, optimizer in roles.trained():
            if id(optimizer) not in self._held_back:
                self._held_back.add(id(optimizer))
                optimizer.register_step_pre_hook(lambda *_: self._under_way.wait_copied())

    def _write(self, target: Path, state: LearnerState, roles: Roles, tensors: dict[str, Any], packed: bytes) -> None:
        """Runs on the thread of the save; collective over the group of the saves."""
        aside, group = target.with_name(target.name + ".tmp"), self._group
        try:
            write_tensors(tensors, aside, rank=self._rank, group=group)
            proven = prove_own(aside, self._rank, HOST, group)

            def write_small() -> None:
                write_base(aside, roles.policy.adapters)
                (aside / STATE_FILE).write_text(json.dumps(asdict(state)) + "\n")
                (aside / REPLAY_FILE).write_bytes(packed)
                sealed.seal(aside, proven)

            def commit() -> None:
                with disk_space(aside, len(packed)):
                    write_small()
                self._commit(aside, target)

            however_long(commit if self._rank == 0 else lambda: None, HOST, group)
            if group is not None:
                barrier(group)  # otherwise the others would continue as after a save although rank 0 failed
        except DiskFullError:
            raise
        except (OSError, CheckpointException) as error:
            raise CheckpointError(
                f"cannot write checkpoint {target}: {said_of(error)}. Earlier checkpoints are intact; free space or "
                "choose another run.dir, then continue with resume=auto"
            ) from error

    def begun(self, resume: str) -> bool:
        """Whether this start of the run has already saved a checkpoint or begun its branch. torchrun counts a restart
        only if a rank died, and not if machines joined or left."""
        start = owner_of(self._folder.parent) or ""
        if resume == "auto" or not start:
            return False
        if resume != "never":
            return branch_begun(self._folder, resume, start)
        # A new run begins in an empty folder, so all checkpoints in it are its own.
        return start == self._run and newest(self._folder)[0] is not None

    def choose(self, resume: str, restarted: bool) -> Path | None:
        """Choose the checkpoint to continue from by `resume`: `never`, `auto` or a path.

        Args:
            restarted: this rank was started again (see `begun`). Then with `never` the run's own checkpoints come
                first; with a path they always do, once the branch from it has begun (`begin_branch`).

        Raises:
            CheckpointError: it is damaged, or the path holds none.
            RunFolderError: with `auto`, if a branch has begun here that has not saved yet.
        """
        if resume == "auto" or (resume == "never" and restarted):
            path = self.newest()
            if path is None and resume == "auto":
                refuse_bare_fork(self._folder)
            return path
        if resume == "never":
            return None
        start = owner_of(self._folder.parent) or ""
        if branch_begun(self._folder, resume, start) and (newest := self.newest()) is not None:
            return newest
        path = Path(resume).resolve()
        sealed.verify(path)
        self._branch = path, resume, start
        return path

    def begin_branch(self) -> None:
        """On rank 0: begin the branch, once the checkpoint chosen by path is loaded and fits. Before that, a path that
        does not fit would have put all checkpoints here aside, with nothing to continue from."""
        if self._branch is None:
            return
        (path, resume, start), self._branch = self._branch, None
        for name, aside in begin_branch(self._folder, path, resume, start):
            log.warning(
                "%s is from the steps that this resume leaves behind. It is kept as %s until you delete it", name, aside
            )
        self.best.begin()

    def newest(self) -> Path | None:
        """The verified checkpoint that `latest` points to; if it is damaged, the newest complete one before it, with a
        log line. None if there is none.

        Raises:
            CheckpointError: there are some but none is complete; the message names the file.
            CheckpointMismatchError: another run saved it.
        """
        path, damaged, said = newest_whole(self._folder)
        if said:  # a kill while `latest` was being replaced
            log.warning("%s", said)
        if path is None:
            return None
        refuse_stranger(
            path,
            self._run,
            f"its groups and versions are different. To begin with its weights anyway, give resume={path}; "
            "otherwise delete it",
        )
        for line in put_aside(self._folder, damaged, path):
            log.error("%s", line)
        self._errands.resumed(path)
        return path

    def load(self, path: Path, roles: Roles) -> tuple[LearnerState, dict[str, Any]]:
        """Fill `roles` in place from a checkpoint saved with any number of ranks.

        Returns:
            The learner's state and the replay server's snapshot.

        Raises:
            CheckpointError: a file is damaged or missing.
            CheckpointMismatchError: the checkpoint is of another model. `roles` are then unchanged.
        """
        self._verify(path, roles.policy.device)
        check_base(path, roles.policy.adapters)
        fill(path, roles)
        state = read_state(path / STATE_FILE)
        if roles.kl_control is not None and state.kl_coef > 0:  # with a coefficient of 0, factors would keep it at 0
            roles.kl_coef = state.kl_coef
        for name, each in roles.spikes.items():
            each.restore(state.norms.get(name, ()), state.spikes.get(name, 0))
        return state, msgpack.unpackb((path / REPLAY_FILE).read_bytes(), strict_map_key=False)

    def _refuse_takeover(self) -> None:
        """Raises RunFolderError if the folder belongs to another run by now."""
        now = origin_of(self._folder.parent)
        if now != self._run:
            raise RunFolderError(
                f"{self._folder.parent} belonged to run {self._run or '(none)'} when this learner began, and now "
                f"belongs to run {now or '(none)'}: it was deleted and started again (overwrite=true). This learner "
                "ends"
            )

    def _verify(self, path: Path, device: torch.device) -> None:
        """Rank 0 verifies for all ranks, so that not each of them reads every file. Raises CheckpointError."""
        damage = ""
        try:
            if self._rank == 0:
                sealed.verify(path)
        except CheckpointError as error:
            damage = str(error)
        damage = text_of_rank_zero(damage, device)
        if damage:
            raise CheckpointDamagedError(damage)

    def _commit(self, aside: Path, target: Path) -> None:
        with self.best.held:
            if target.exists():
                # Saved again after a resume from an earlier one. With the name of `aside` the new one would be deleted.
                self.best.replaced(target)
                sealed.remove(target.rename(target.with_name(target.name + ".old.tmp")))
            sealed.move_into_place(aside, target)
            with disk_space(self._folder / LATEST, 0):
                sealed.point(self._folder / LATEST, target)
            if self.best.saved(int(target.name.removeprefix("step_"))):
                log.info("the best checkpoint is now %s", target.name)
        self._errands.saved(target, int(target.name.removeprefix("step_")))
        self._remove_old()

    def _remove_old(self) -> None:
        """At a save, and when one finds no space: delete old checkpoints, also those that were needed until now."""
        latest = self._folder / LATEST
        if not (latest.is_symlink() and latest.exists()):
            return
        with self.best.held:
            newest = self._folder / latest.readlink().name
            spared = self.best.kept() | self._errands.needed()
            over = prune(self._folder, newest, self._keep, spared, every=self._every)
        for path in over:
            shutil.rmtree(path)
