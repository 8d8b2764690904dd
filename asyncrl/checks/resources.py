"""Checks the resources that a role takes on its machine: GPUs, an address to listen on, a folder to write to."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from asyncrl.checks.addresses import host_of, interfaces_here, unknown_interfaces
from asyncrl.checks.placement import (
    PLACED,
    gpus_of_rewards,
    gpus_seen,
    impossible_placement,
    misread_gpus,
    on_gpus,
    pool_demand,
    visible_gpus,
)
from asyncrl.checks.rules.replay import serves_weights
from asyncrl.errors import ConfigError
from asyncrl.placement import engine_share
from asyncrl.schema import Config


def missing_devices(config: Config, role: str, planned: bool = False) -> Iterator[str]:
    """Report settings that need more GPUs than this machine has; nothing is known about others (`ray.address`).

    Args:
        planned: nothing will be started, and the machine in question has `placement.gpus`.
    """
    visible = visible_gpus()
    if visible is None:
        return
    learner = role in ("local", "learner") and config.learner.device != "cpu"
    if misread := list(misread_gpus(config)) if learner or (role in ("local", "rollout") and on_gpus(config)) else []:
        yield from misread
        return
    gpus = config.placement.gpus if planned and config.placement.gpus else len(visible)
    problems = [*_more_than_there_are(config, role, gpus)]
    yield from problems or (impossible_placement(config, gpus) if role == "local" else ())


def _more_than_there_are(config: Config, role: str, gpus: int) -> Iterator[str]:
    here = role in ("local", "rollout") and not config.ray.address
    if here and config.rollout.host == "ray":
        yield from _more_than_ray_has(config, role, gpus)
    devices = {"engine.device": (config.engine.device, 1)} if here else {}
    if role in ("local", "learner"):
        ranks = config.learner.ranks if role == "local" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if role == "learner" and config.learner.device in PLACED and ranks > gpus > 0:
            yield (
                f"{ranks} learner ranks were started here (torchrun's --nproc-per-node), one GPU each, and this "
                f"machine has {gpus}{gpus_seen()}. Start {gpus}, or set learner.device=cpu"
            )
            return
        devices["learner.device"] = (config.learner.device, ranks if config.learner.device == "cuda" else 1)
    for key, (device, wanted) in devices.items():
        first = int(device.partition(":")[2] or 0)
        if device.startswith("cuda") and first + wanted > gpus:
            yield f"{key}={device} needs {first + wanted} GPU(s), and this machine has {gpus}. Set {key}=auto or cpu"
    on_cpu = config.learner.device == "cpu" or (config.learner.device == "auto" and not gpus)
    if role in ("local", "learner") and config.weights.backend == "nccl" and on_cpu:
        yield (
            f"weights.backend=nccl needs a learner on GPUs: learner.device={config.learner.device}, and this machine "
            f"has {gpus}. Set weights.backend=sockets"
        )


def _more_than_ray_has(config: Config, role: str, gpus: int) -> Iterator[str]:
    """Report workers and reward services for which the local Ray would wait forever. Where `asyncrl local` places the
    engines, `impossible_placement` reports them."""
    if gpus and on_gpus(config):
        try:
            if role == "rollout":
                engine_share(gpus, pool_demand(config))
        except ConfigError as error:
            yield str(error)
        return
    workers = config.ray.gpus_per_worker * config.rollout.workers
    wanted = workers + gpus_of_rewards(config)
    if wanted > gpus:
        zero = {"ray.gpus_per_worker=0": workers, "reward.gpus=0": config.reward.gpus}
        yield (
            f"ray.gpus_per_worker={config.ray.gpus_per_worker:g} for rollout.workers={config.rollout.workers} (and "
            f"reward.gpus={config.reward.gpus:g}) needs {wanted:g} GPUs, and this machine has {gpus}: Ray would "
            f"wait for them forever. Set {' '.join(way for way, count in zero.items() if count)}, or ray.address of a "
            "cluster that has them"
        )


def taken_addresses(config: Config, role: str) -> Iterator[str]:
    """Report addresses on which this role must listen and cannot. Addresses that are chosen at the start are not
    checked."""
    given = config.replay.address
    if role != "local":  # others fail when they listen
        return
    if given.startswith("tcp://") and given != Config().replay.address:
        yield from _taken("replay.address", host_of(given), int(given.rpartition(":")[2]))
    if serves_weights(config):
        yield from _taken("weights.host", config.weights.host, config.weights.port)


def missing_interfaces(config: Config, role: str) -> Iterator[str]:
    """Report interfaces that a learner's machine lacks; workers check those of their own machines."""
    weights = config.weights
    sends = os.environ.get("RANK", "0") == "0"
    if role not in ("local", "learner") or weights.transport != "broadcast" or not sends:
        return
    nccl = weights.backend == "nccl" or (weights.backend == "auto" and bool(visible_gpus()))
    missing = unknown_interfaces(weights.interface, nccl=nccl)
    if missing:
        yield (
            f"weights.interface={weights.interface}: this machine has no network interface {', '.join(missing)}. It "
            f"has {interfaces_here()}. Name one of those, or leave it empty"
        )


def _taken(key: str, host: str, port: int) -> Iterator[str]:
    where = f"{key}={host}{f':{port}' if port else ''}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As ZeroMQ does, so that the port of a server that has just ended counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        yield f"{where}: there is no such host ({error.strerror}). Give an address of this machine"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield f"{where} is already in use. End the process that listens there, or give another port"
        else:
            yield f"{where} cannot be listened on: {error.strerror}. Give an address of this machine"


def unwritable_folders(config: Config, role: str) -> Iterator[str]:
    if role != "local":  # the other roles fail when they write
        return
    folder = Path(config.run.dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return  # refused with the run folder itself
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        mend = "Free space there" if error.errno == errno.ENOSPC else "Let this user write there"
        yield (
            f"run.dir={config.run.dir} cannot be written: {error.strerror or error} ({folder}). {mend}, or give "
            "another run.dir"
        )
