"""A process group of its own for weights, between processes that share no default group (gloo and nccl alike).

One store per publisher, bound to one address; every epoch of the group has its own key prefix, so a group can be
formed anew with other members while a broken one is still being torn down.
"""

# torch documents its stores at `torch.distributed` but does not list them in `__all__`.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrl.errors import WeightsError


def host_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Serve a store on a free port of `host` only (the default of torch is every interface)."""
    listener = socket.create_server((host, 0), backlog=128)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        host, port, None, True, timedelta(seconds=timeout_s), wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Raises WeightsError when nobody answers there within `timeout_s`."""
    try:
        # A bare socket first: the client of torch retries for its whole timeout where nobody listens.
        socket.create_connection((host, port), timeout=min(timeout_s, 5.0)).close()
        return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise WeightsError(f"the publisher's store at {host}:{port} does not answer: {error}") from error


_PIECE = 4 << 20
"""Bytes that gloo sends at a time. What arrives is hashed while it is in cache and the next piece is on its way; longer
ones also pass through the sockets more slowly."""


class WeightGroup:
    """One epoch of the group: rank 0 is the publisher, ranks 1.. its subscribers.

    Joining, every broadcast and leaving are bounded by `timeout_s`; any of them raises RuntimeError when a member
    dies or stays silent, and the group is useless from then on.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        backend: str,
        host: str,
        epoch: int,
        rank: int,
        world: int,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self.epoch, self.rank, self.world = epoch, rank, world
        self._backend, self._timeout_s = backend, timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore(f"group/{epoch}", store)
        prefixed.set_timeout(self._timeout)
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._timeout = self._timeout  # pyright: ignore[reportAttributeAccessIssue]
            gloo = dist.ProcessGroupGloo
            loopback = host in ("127.0.0.1", "localhost")
            interface = gloo.create_device(hostname=host) if loopback else gloo.create_default_device()
            options._devices = [interface]  # pyright: ignore[reportAttributeAccessIssue]
            self._group = dist.ProcessGroupGloo(prefixed, rank, world, options)
        else:
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            nccl.is_high_priority_stream = True
            self._group = dist.ProcessGroupNCCL(prefixed, rank, world, nccl)
            self._group.eager_connect_single_device(device)

    def pieces(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        """Flat `buffer` as it is broadcast, in the same parts at both ends. nccl cuts for itself and gets it whole."""
        if not len(buffer):
            return ()
        return buffer.split(_PIECE) if self._backend == "gloo" else (buffer,)

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        """Send (rank 0) or receive into `buffer`; `.wait()` raises RuntimeError if a member is gone or silent."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        return self._group.broadcast([buffer], options)  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self, work: dist.Work) -> None:
        """Until `work` is done. Raises RuntimeError when a member is gone, or silent for `timeout_s`."""
        if self._backend == "gloo":
            work.wait()
            return
        # nccl only enqueues: this waits for the peers' GPUs, with a deadline of our own instead of its watchdog's.
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.abort()
                raise RuntimeError(f"epoch {self.epoch}: a broadcast was not finished after {self._timeout_s} s")
            time.sleep(0.0005)
        work.wait()

    def abort(self) -> None:
        """Leave at once; whoever still waits in this group gets an error now instead of a timeout."""
        self._group.abort()
