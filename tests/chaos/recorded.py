"""Record a small run folder with every component that writes one, and resume in it with every component that reads one,
all in one process and without waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.cli.starting.folder_check import refuse_damaged
from asyncrl.config import JOURNAL_DIR, load_config
from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
from asyncrl.learner.checkpoints.export import export_hf
from asyncrl.learner.model.attention import PACKED_ATTENTION
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.optimizer.update import make_optimizer
from asyncrl.learner.roles import Roles
from asyncrl.replay.audit.ledger_file import LEDGER_FILE, LedgerFile
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.journal.disk import FolderDisk
from asyncrl.replay.journal.durable import open_core
from asyncrl.replay.journal.log import Journal, JournalSettings
from asyncrl.schema import Config, LearnerConfig, ModelConfig
from asyncrl.storage.lines import read_lines
from asyncrl.telemetry.folder.run_folder import prepare_run_folder
from asyncrl.telemetry.metrics.log import METRICS_FILE, SAMPLES_FILE, MetricsLog
from asyncrl.types import NO_VERSION
from tests.learner.feed import tiny_model
from tests.replay.helpers import Clock, header, settings

SAVE_EVERY = 3
STEPS = 8
ADMISSION = settings(groups_per_step=2, pipeline_depth=1)


@dataclass(frozen=True)
class Opened:
    core: ReplayCore
    journal: Journal


@dataclass(frozen=True)
class Outcome:
    """The state after a resume. Two runs with equal outcomes continue in the same way."""

    parts: dict[str, Any]

    def differences(self, other: Outcome) -> list[str]:
        return [name for name, part in self.parts.items() if part != other.parts[name]]


@cache
def composed(*overrides: str) -> Config:
    return load_config(["model.path=m", "data.path=d", "reward.function=r.py:f", *overrides])


def config_of(folder: Path, *overrides: str) -> Config:
    config = composed(*overrides)
    config.run.dir = str(folder)
    return config


def roles_of(seed: int) -> Roles:
    hf = tiny_model(seed=seed)
    hf.set_attn_implementation(PACKED_ATTENTION)
    model = PolicyModel(hf)
    return Roles(policy=model, optimizer=make_optimizer(model.parameters(), LearnerConfig(lr=0.01)))


def opened(folder: Path) -> Opened:
    ledger = LedgerFile(folder / LEDGER_FILE)
    core, journal = open_core(
        FolderDisk(folder / JOURNAL_DIR, locked=True),
        ADMISSION,
        Clock(),
        journal=JournalSettings(segment_bytes=1 << 14),
        run={"run_id": "r", "run_digest": "d", "boot": "b"},
        listener=ledger,
        replayed=ledger.replayed,
    )
    return Opened(core, journal)


def record(folder: Path, *, finished: bool) -> None:
    """Record a run of STEPS steps. Without `finished` it is killed after the last step, between two checkpoints."""
    prepare_run_folder(config_of(folder), "first")
    run, roles = opened(folder), roles_of(0)
    checkpoints = Checkpoints(folder / "ckpt", rank=0, keep=2)
    log = MetricsLog(folder, "run", {}, False, False, None)
    core = run.core
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l1")
    core.publish(policy_version=0, parent=NO_VERSION)
    core.hello("w", "a")
    for step in range(STEPS):
        version = step
        core.served("w", "a", version, "f")
        for order in core.acquire("w", "a", 3, step + 1).assignments:
            core.insert("w", "a", header(order, (version, 3)), f"payload {order.group_id} ".encode() * 40)
        assert core.lease(step) is not None
        _update(roles)
        version = step + 1
        core.trained(step=step, policy_version=version)
        run.journal.write_batch()
        if (step + 1) % SAVE_EVERY == 0 or (finished and step + 1 == STEPS):
            state = LearnerState(step=step, policy_version=version, skipped_steps=0)
            checkpoints.save(state, roles, core.snapshot())
            core.commit(step)
            run.journal.write_batch()
        log.write(step + 1, version, {"reward/mean": step / 7, "staleness/mean": 1.5})
        log.samples(step + 1, [{"prompt": f"p{step}", "completion": "c", "reward": step / 3}])
    log.close()
    if finished:
        model = folder.parent / "model"
        tiny_model(seed=0).save_pretrained(model)
        export_hf(roles.policy, ModelConfig(path=str(model)), folder / "hf", 0)
        core.finish()
        run.journal.close()
    else:
        run.journal.disk.close()


def _update(roles: Roles) -> None:
    for parameter in roles.policy.parameters():
        parameter.grad = parameter.detach().sin()
    roles.optimizer.step()
    roles.optimizer.zero_grad()


def resume(folder: Path, say: Callable[[str], None]) -> Outcome:
    """Resume in `folder` as `resume=auto` does, up to the first step.

    Raises:
        AsyncRLError: the resume is refused.
    """
    refuse_damaged(folder, "auto", say)
    prepare_run_folder(config_of(folder, "resume=auto"), "second")
    run, roles = opened(folder), roles_of(1)
    checkpoints = Checkpoints(folder / "ckpt", rank=0, keep=2)
    try:
        chosen = checkpoints.choose("auto", restarted=False)
        if chosen is None:
            trained, restored = (
                0,
                run.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l2"),
            )
        else:
            state, snapshot = checkpoints.load(chosen, roles)
            trained = state.step + 1
            restored = run.core.restore(
                step=state.step, policy_version=state.policy_version, snapshot=snapshot, incarnation="l2"
            )
        run.journal.write_batch()
    finally:
        run.journal.close()
    MetricsLog(folder, "run", {}, False, False, trained or None).close()
    digest = hashlib.sha256()
    for parameter in roles.policy.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    exported = sorted((folder / "hf").glob("*")) if (folder / "hf").is_dir() else []
    return Outcome(
        {
            "next": (restored.next_step, restored.next_version),
            "weights": digest.hexdigest(),
            "replay": run.core.state.image(),
            "payloads": {group: entry.payload for group, entry in run.core.state.ledger.entries.items()},
            "metrics": [{**row, "time": 0} for row in read_lines(folder / METRICS_FILE).rows],
            "samples": read_lines(folder / SAMPLES_FILE).rows,
            "ledger": read_lines(folder / LEDGER_FILE).rows,
            "config": (folder / "config.yaml").read_text().replace(str(folder), ""),
            "export": [(path.name, path.read_bytes() if path.is_file() else None) for path in exported],
        }
    )
