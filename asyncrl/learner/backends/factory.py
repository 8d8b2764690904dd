"""Joins the ranks of a run and lays them out as configured: the only place where a backend is made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.checks.addresses import OF_THE_RANKS, interface_of, is_loopback, own_address
from asyncrl.checks.parallel import ParallelDims, problem_of
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.parallel.collectives import barrier, train_apart
from asyncrl.learner.parallel.place import Place
from asyncrl.schema import Config


def group_interfaces(environment: Mapping[str, str], weights_host: str, weights_interface: str = "") -> dict[str, str]:
    """Environment variables that bind gloo and nccl to loopback if all ranks are on this machine, and otherwise gloo to
    the interface towards rank 0 (MASTER_ADDR).

    Without them both listen on the address of the machine's own name, which in many /etc/hosts is loopback. nccl has
    one setting for all groups of a process, so it is `weights.interface`; without that setting it stays unset if the
    weights go to other machines.
    """
    master = environment.get("MASTER_ADDR", "127.0.0.1")
    inside = is_loopback(master)
    leads = "lo" if inside else _interface_towards(master)
    held = {"GLOO_SOCKET_IFNAME": leads} if leads else {}
    if weights_interface:
        held["NCCL_SOCKET_IFNAME"] = weights_interface
    elif inside and is_loopback(weights_host):
        held["NCCL_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in held.items() if name not in environment}


def _interface_towards(host: str) -> str:
    """Name of the interface; empty if there is none or it is not known."""
    try:
        return interface_of(own_address(host))
    except OSError:
        return ""


@contextmanager
def joined_ranks(config: Config, place: Place) -> Iterator[FSDP2]:
    """The process group of the ranks, also for a single rank, so that the same code runs everywhere. On exit the ranks
    leave together, because rank 0 hosts the store of the others and must not leave first; a rank that fails leaves at
    once.

    Its timeout covers what rank 0 may do alone while the others wait in a collective: wait for a batch, wait for the
    engines to acknowledge weights, write a checkpoint.

    Raises:
        ConfigError: this number of ranks cannot be laid out as configured.
    """
    alone_s = config.replay.wait_timeout_s + 10 * config.weights.timeout_s + 60
    patience = timedelta(seconds=alone_s)
    backend = "nccl" if place.device.type == "cuda" else "gloo"
    held = group_interfaces(os.environ, config.weights.host, config.weights.interface)
    os.environ.update(held | {OF_THE_RANKS: held.get("GLOO_SOCKET_IFNAME", "")})
    try:
        if place.world == 1 and "MASTER_ADDR" not in os.environ:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=patience)
        else:
            dist.init_process_group(backend, timeout=patience)
        yield backend_of(config, place)
        barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def backend_of(config: Config, place: Place) -> FSDP2:
    """Lay the ranks out as `config.learner` says. Collective.

    Raises:
        ConfigError: this number of ranks does not allow it.
    """
    if problem := problem_of(config.learner, place.world, "the number of ranks"):
        raise ConfigError(problem)
    dims = ParallelDims.of(config.learner, place.world)
    train_apart(sequence=dims.sequence, tensor=dims.tensor)
    sizes = dims.mesh
    mesh = init_device_mesh(place.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return FSDP2(mesh, on_host=config.learner.offload == "all")
