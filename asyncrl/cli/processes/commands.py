"""The command lines of a run's processes, as they could be typed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.checks.override_syntax import quoted
from asyncrl.checks.placement import VISIBLE, met_twice, named, placement_of
from asyncrl.cli.processes.ports import free_port
from asyncrl.placement import WHOLE_SHARE
from asyncrl.schema import Config, RunSettings
from asyncrl.settings.replay import ReplayConfig

# On a machine full of processes, two math threads per rank make all of them slower and none faster.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

COMMANDS_FILE = "commands.txt"
"""File in the folder of logs, with the whole command line of each role."""
DERIVED = ("overwrite=", "run.dir=", "replay.address=", "replay.shard_address=")
SHOWN = {sys.executable, "-m"}
"""Arguments that are shown though all roles have them."""

RESTARTED = "ASYNCRL_RESTARTED"
"""Environment variable set in a role that its supervisor restarted after a kill: a learner then resumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    role: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that are set unless the inherited environment has them."""
    gpus: str | None = None
    """CUDA_VISIBLE_DEVICES, which replaces the inherited value; None keeps that."""

    @property
    def enforced(self) -> dict[str, str]:
        """Variables that are set even if they were inherited."""
        return {} if self.gpus is None else {VISIBLE: self.gpus}

    def __str__(self) -> str:
        """Return the command as for a shell, with all settings."""
        settings = [
            f"{name}={shlex.quote(value)}" for name, value in sorted({**self.environment, **self.enforced}.items())
        ]
        return " ".join([*settings, shlex.join(("python", *self.arguments[1:]))])

    def short(self, shared: Collection[str]) -> str:
        """Return the command without the settings `shared` by all roles, torchrun's options and the variables."""
        options = ("--nnodes=", "--max-restarts=", "--rdzv-", "--log-dir=")
        shown = [text for text in self.arguments[1:] if text not in shared and not text.startswith(options)]
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.enforced.items())]
        return " ".join([*settings, shlex.join(("python", *shown))])


def tell_commands(commands: Sequence[Command], typed: Sequence[str], log_dir: Path) -> list[str]:
    """Return lines for the screen: each role's command without what all have in common, which is what was typed. The
    whole commands are written into `log_dir`."""
    shared = set.intersection(*(set(command.arguments) for command in commands))
    # Absolute paths and addresses are derived from what was typed.
    shared |= {text for command in commands for text in command.arguments if text.startswith(DERIVED)}
    log_dir.mkdir(parents=True, exist_ok=True)
    file = log_dir / COMMANDS_FILE
    file.write_text("".join(f"{command.role}: {command}\n" for command in commands))
    given = shlex.join(typed[2:])
    return [
        *(f"{command.role}: {command.short(shared - SHOWN)}" for command in commands),
        *([f"each with the settings {given}"] if given else []),
        f"their whole command lines: {file}",
    ]


def _python(role: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Command:
    """Return the command that runs a module, under this interpreter, whatever is first on PATH."""
    return Command(role=role, arguments=(sys.executable, "-m", *arguments), environment=environment or {})


def replay_command(overrides: Sequence[str]) -> Command:
    return _python("replay", "asyncrl.replay", *overrides)


def rollout_command(overrides: Sequence[str]) -> Command:
    return _python("rollout", "asyncrl.rollout", *overrides, environment=ONE_THREAD)


def learner_command(config: Config, overrides: Sequence[str], run_id: str, module: str = "asyncrl.learner") -> Command:
    """Return the command of torchrun, by the module that registers our rendezvous backend."""
    torchrun = (
        *("asyncrl.learner.torchrun", "--nnodes=1", f"--nproc-per-node={config.learner.ranks}"),
        *(f"--max-restarts={config.learner.max_restarts}", f"--rdzv-id={run_id}"),
        # Every store gets a free port on loopback only: torch's own backends listen on every interface.
        *("--rdzv-backend=bound", "--rdzv-endpoint=127.0.0.1:0"),
    )
    return _python("learner", *torchrun, "-m", module, *overrides, environment=ONE_THREAD)


def local_commands(config: Config, overrides: Sequence[str], run_id: str) -> list[Command]:
    """Return the commands of a run on this machine, in any order: they find each other at `replay.address`."""
    given = with_address(config, with_absolute_run_dir(config, overrides), ReplayConfig().address)
    # The caller prepares the folder once: with overwrite, a restarted replay server would lose its journal.
    kept = [text for text in given if not text.startswith("overwrite=")]
    return [replay_command(kept), rollout_command(given), learner_command(config, given, run_id)]


def with_gpus(commands: Sequence[Command], config: Config, visible: Sequence[str]) -> list[Command]:
    """Return `local_commands` with each role's share of the GPUs that this process sees. If none are known, nothing is
    set, whatever `placement.gpus` is."""
    if not visible:
        return list(commands)
    placement = placement_of(config, len(visible))
    told = {"learner": [], "rollout": []}
    if placement.learner and placement.engines:  # `weights.backend=auto` depends on it
        told["learner"].append(f"placement.mode={'colocated' if placement.shared else 'dedicated'}")
    chosen = config.weights.transport == "broadcast" and config.weights.backend == "auto"  # else refused as idle
    if chosen and not placement.shared and met_twice(config, placement):
        told["learner"].append("weights.backend=sockets")
    crowded = placement.engine_memory < WHOLE_SHARE  # it shares a GPU with a rank or another engine
    if config.engine.name == "vllm" and crowded and "gpu_memory_utilization" not in config.engine.vllm:
        told["rollout"].append(f"engine.vllm.gpu_memory_utilization={placement.engine_memory:g}")
    own = {"learner": placement.learner_gpus, "rollout": placement.rollout_gpus}
    return [
        replace(
            command,
            arguments=(*command.arguments, *told.get(command.role, ())),
            gpus=named(own[command.role], visible) if own.get(command.role) else None,
        )
        for command in commands
    ]


def with_address(config: Config, overrides: Sequence[str], default_address: str) -> tuple[str, ...]:
    """Return `overrides` with a free loopback port for the replay server, unless the user named an address."""
    named = any(text.startswith("replay.address=") for text in overrides)
    if named or config.replay.address != default_address:
        return tuple(overrides)
    return (*overrides, f"replay.address=tcp://127.0.0.1:{free_port()}")


def with_absolute_run_dir(config: RunSettings, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return `overrides` with the absolute path of the run folder, since a role may run in another directory."""
    others = [text for text in overrides if not text.startswith("run.dir=")]
    return (*others, f"run.dir={quoted(str(Path(config.run.dir).resolve()))}")
