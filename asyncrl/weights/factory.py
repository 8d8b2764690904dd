"""Builds the two ends of a weight transport from the config. A new transport is one file and one branch in each
function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.weights.base import LoadWeights, Publisher, PublisherRendezvous, SubscriberRendezvous
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.staging import Receiver, Staging
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.canary import Proof, Score
from asyncrl.weights.files.sender import FilesSender
from asyncrl.weights.files.shelf import UrlShelf
from asyncrl.weights.files.subscriber import FilesSubscriber
from asyncrl.weights.publishing.publisher import Sender, WeightPublisher
from asyncrl.weights.subscriber import Subscriber

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PHASES = 10
"""Multiple of `weights.timeout_s` that `publish` waits for the sender: one send may lose several peers one by one."""


def make_publisher(
    config: Config, rendezvous: PublisherRendezvous, run_dir: Path, rank: int, device: torch.device
) -> Publisher:
    """Build the learner's end. Only rank 0 sends; other ranks do not use
    `rendezvous` and `run_dir`.

    Raises:
        ConfigError: unknown transport or wire dtype.
    """
    weights = with_dtypes(config, learner=device.type).weights
    if weights.wire_dtype not in _DTYPES:
        raise ConfigError(f"weights.wire_dtype={weights.wire_dtype!r} is unknown; it is one of {', '.join(_DTYPES)}")
    backend = backend_of(config, device)
    link = Link(
        host=weights.host,
        timeout_s=weights.timeout_s,
        backend=backend,
        interface=weights.interface,
        device=device,
    )
    sender: Sender | None = None
    wait_s = _PHASES * weights.timeout_s
    if rank == 0 and weights.transport == "broadcast":
        sender = BroadcastSender(rendezvous, link, port=weights.port)
    elif rank == 0 and weights.transport == "files":
        folder, shelf = Path(run_dir) / "weights", None
        if weights.url:
            within_s = _PHASES / 2 * weights.timeout_s
            shelf = UrlShelf(weights.url, folder, read_url=weights.fetch_url, within_s=within_s)
        sender = FilesSender(
            rendezvous,
            folder,
            delta=weights.delta,
            shelf=shelf,
        )
    elif weights.transport not in ("broadcast", "files"):
        raise _unknown(weights.transport)
    return WeightPublisher(
        sender,
        wire_dtype=_DTYPES[weights.wire_dtype],
        bucket_bytes=weights.bucket_mb << 20,
        wait_s=wait_s,
        device=device,
    )


def _unknown(transport: str) -> ConfigError:
    return ConfigError(f"weights.transport={transport!r} is unknown; it is broadcast or files")


def make_subscriber(
    config: Config,
    rendezvous: SubscriberRendezvous,
    worker: str,
    incarnation: str,
    load: LoadWeights,
    receiver: Receiver | None = None,
    score: Score | None = None,
    stall_s: Callable[[], float] | None = None,
    admit: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
    everywhere: Callable[..., Any] | None = None,
) -> Subscriber:
    """Build the worker's end; its thread runs from here to `close`.

    Args:
        receiver: the engine's own receiver, if it has one.
        score: the engine's scoring function; None (an engine without a model) skips the canary.
        stall_s: returns the seconds for which the engine was paused for loads since it started.
        admit: raises for names, shapes or dtypes (tensors on `meta`) that the engine's model does not have, before any
            memory is allocated for them.
        everywhere: for an engine of several replicas, see `Proof`.
    """
    weights = config.weights
    gpu = _engine_gpu(config.engine.device)
    proof = None
    if score is not None:
        engine = with_dtypes(config, engine="cuda" if gpu is not None else "cpu").engine
        proof = Proof(
            score=score,
            engine_dtype=engine.dtype,
            verify_every=weights.verify_every,
            everywhere=everywhere,
        )
    if weights.transport == "files":
        return FilesSubscriber(rendezvous, load, proof, stall_s, timeout_s=weights.timeout_s)
    if weights.transport != "broadcast":
        raise _unknown(weights.transport)
    return BroadcastSubscriber(
        rendezvous,
        load,
        worker=worker,
        incarnation=incarnation,
        timeout_s=weights.timeout_s,
        interface=weights.interface,
        receiver=receiver or Staging(gpu),
        proof=proof,
        stall_s=stall_s,
        admit=admit,
    )


def _engine_gpu(device: str) -> torch.device | None:
    """The engine's GPU with its index, which nccl requires."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    # Without asking CUDA, which would be initialised in a process that needs none: vLLM's has the GPU.
    number = torch.device(device).index if device.startswith("cuda") else None
    return torch.device("cuda", number or 0)


def backend_of(config: Config, device: torch.device) -> str:
    """Return the broadcast backend. nccl needs a GPU on both ends, and refuses two ranks on one. `asyncrl local` has
    placed the engines and passes the result to the learner as `placement.mode`. Under a user's own torchrun that is
    `auto`, and a single GPU is taken to be shared.

    Raises:
        ConfigError: nccl without a GPU.
    """
    chosen, mode = config.weights.backend, config.placement.mode
    if chosen == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"weights.backend=nccl needs a learner on GPUs, but this one computes on {device}. Use "
            "weights.backend=sockets"
        )
    if chosen == "ipc" and device.type == "cuda" and config.engine.device == "cpu":
        raise ConfigError(
            "weights.backend=ipc needs GPU memory that the engines can open, but they see no GPU. Use "
            "weights.backend=sockets"
        )
    if chosen != "auto":
        return chosen
    own = mode == "dedicated" or (mode == "auto" and device.type == "cuda" and torch.cuda.device_count() > 1)
    return "nccl" if device.type == "cuda" and own and config.engine.device != "cpu" else "sockets"
