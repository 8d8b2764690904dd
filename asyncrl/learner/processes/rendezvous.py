"""Rendezvous of torchrun's nodes and of the ranks: stores that listen on one address, and in which nothing is pickled.

torch's own ones listen on every interface, and its `c10d` unpickles what it reads from the store: anyone who reaches
the port can run code. Here the set of nodes is fixed. Node 0 listens only on the endpoint's host. All nodes go from
round to round together, and the ranks of every round have a store of their own, so that they do not find addresses of
dead ranks. A single node needs no store for itself, only one for its ranks.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from asyncrl.checks.addresses import is_everywhere
from asyncrl.weights.broadcast.group import host_store

log = logging.getLogger(__name__)

BACKEND = "bound"
_ROUND, _RUN = "round", "run"
_POLL_S = 0.05
_LEAVE_S = 10.0


class RoundOverError(Exception):
    """A node opened the next round before this one had started its ranks."""


class RoundStore(dist.PrefixStore):
    """The store in which the nodes of one round tell each other their ranks.

    waits for:    keys of other nodes, here and not in torch, where a signal ends nothing before the timeout
    unblocked by: the keys, the end of the round, a signal, or the store's timeout
    """

    def __init__(self, prefix: str, store: dist.Store, timeout_s: float, over: Callable[[], bool]) -> None:
        super().__init__(prefix, store)
        self._timeout_s, self._over = timeout_s, over

    def get(self, key: str) -> bytes:
        self._await([key])
        return super().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._await(keys)
        return super().multi_get(keys)

    def _await(self, keys: list[str]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while missing := [key for key in keys if not self.check([key])]:
            if self._over():
                raise RoundOverError
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"waited {self._timeout_s:.0f} s for {', '.join(missing)}: the node(s) of these numbers were here "
                    "and are gone. Start them again, with the same numbers and endpoint"
                )
            time.sleep(_POLL_S)


class BoundRendezvous(RendezvousHandler):
    """A fixed set of nodes; node 0 hosts every store.

    A node whose ranks died opens the next round. The others notice it at their next check (`num_nodes_waiting`), stop
    their ranks and follow. A node that replaces a dead one does the same.

    Args:
        host: address of node 0 on the interface to listen on.
        port: port of the nodes' store; not used by a single node. The ranks' store has another, free port.
        run_id: any word. Several nodes take that of node 0, with an addition for each start of node 0: otherwise a new
            start with the word of an earlier one would look like its restart, which continues without a resume.
        timeout_s: limit on the seconds until all nodes have arrived.
    """

    def __init__(self, *, host: str, port: int, node: int, nodes: int, run_id: str, timeout_s: float) -> None:
        self._host, self._port = host, port
        self._node, self._nodes = node, nodes
        self._run_id, self._timeout_s = run_id, timeout_s
        self._token = uuid.uuid4().hex
        self._meeting: dist.Store | None = dist.HashStore() if nodes == 1 else None
        self._ranks: dist.TCPStore | None = None
        """Kept during its round: the store lives in this process."""
        self._round = -1

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks only connect to their store. If a rank hosted it, it would be lost when the rank dies."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Consumes: rounds. Waits for: every node, `timeout_s`. Unblocked by: the last of them.

        Raises:
            RendezvousConnectionError: node 0 cannot listen, or does not answer.
            RendezvousTimeoutError: a node did not arrive.
            RendezvousStateError: another process has taken the seat of this node.
        """
        deadline = time.monotonic() + self._timeout_s
        store = self._meeting = self._meeting or self._open_meeting()
        self._enter(store)
        while missing := [node for node in range(self._nodes) if not store.check([self._seat(node)])]:
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"waited {self._timeout_s:.0f} s for node(s) {', '.join(map(str, missing))} of {self._nodes} at "
                    f"{self._host}:{self._port}. Start each with its own number, and the same endpoint"
                )
            time.sleep(_POLL_S)
            if self._current(store) != self._round:  # a node was restarted while the others waited for it
                self._enter(store)
        if self._nodes > 1:
            self._run_id = store.get(_RUN).decode()
        port = int(store.get(f"{_ROUND}/{self._round}/port"))
        shared = RoundStore(f"{_ROUND}/{self._round}/shared", store, self._timeout_s, self.is_over)
        return RendezvousInfo(shared, self._node, self._nodes, RendezvousStoreInfo(self._host, port))

    def num_nodes_waiting(self) -> int:
        """Any value but 0 makes torchrun restart the ranks. Raises RuntimeError if node 0 is gone."""
        return int(self.is_over())

    def is_over(self) -> bool:
        """Whether a node has opened the next round. Raises RuntimeError if node 0 is gone."""
        return self._meeting is not None and self._current(self._meeting) != self._round

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True

    def leave(self) -> None:
        """Call when all ranks have finished. On node 0, which hosts the store, waits for: the other nodes, which still
        read from it; `_LEAVE_S`."""
        with suppress(dist.DistError):
            left, deadline = self._left(1), time.monotonic() + _LEAVE_S
            while self._node == 0 and left < self._nodes and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                left = self._left(0)

    def _enter(self, store: dist.Store) -> None:
        """Take this node's seat in the newest round. If it is taken, by this node, whose ranks have died since, or by
        the node that this one replaces, take it in the next round. A node that lives and was replaced must end, or both
        would open round after round."""
        current = self._current(store)
        if store.check([seat := f"{_ROUND}/{current}/{self._node}"]):
            if current > self._round > -1 and store.get(seat).decode() != self._token:
                raise RendezvousStateError(
                    f"node {self._node} was started a second time, and the second takes part. If that was not meant "
                    "to replace this one, give each machine its own number (NODE_RANK)"
                )
            store.compare_set(_ROUND, str(current), str(current + 1))
            current = self._current(store)
        self._round = current
        if self._node == 0:
            self._ranks, port = self._host_store(0)
            store.set(f"{_ROUND}/{current}/port", str(port))
        store.set(self._seat(self._node), self._token)

    def _seat(self, node: int) -> str:
        return f"{_ROUND}/{self._round}/{node}"

    def _left(self, more: int) -> int:
        return self._nodes if self._meeting is None else self._meeting.add("left", more)

    def _current(self, store: dist.Store) -> int:
        return store.add(_ROUND, 0)

    def _open_meeting(self) -> dist.TCPStore:
        if self._node == 0:
            store = self._host_store(self._port)[0]
            store.set(_RUN, f"{self._run_id}-{uuid.uuid4().hex[:12]}")
            return store
        try:
            patience = timedelta(seconds=self._timeout_s)
            return dist.TCPStore(self._host, self._port, None, False, patience, wait_for_workers=False)
        except dist.DistError as error:
            raise RendezvousConnectionError(
                f"node 0 does not answer at {self._host}:{self._port} after {self._timeout_s:.0f} s: {error}"
            ) from error

    def _host_store(self, port: int) -> tuple[dist.TCPStore, int]:
        try:
            return host_store(self._host, self._timeout_s, port)
        except OSError as error:
            raise RendezvousConnectionError(
                f"node 0 cannot listen on {self._host}:{port or 'any port'} ({error}). The rendezvous endpoint must "
                "be an address of node 0's own machine"
            ) from error


def make_rendezvous(parameters: RendezvousParameters) -> BoundRendezvous:
    """Create it from torchrun's options: `--rdzv-endpoint=HOST:PORT`, with several nodes also `--rdzv-conf=rank=N`.

    Raises:
        ValueError: a wildcard address, no port with several nodes, or a variable number of nodes.
    """
    host, port = parse_rendezvous_endpoint(parameters.endpoint.strip(), default_port=0)
    nodes, node = parameters.max_nodes, parameters.get_as_int("rank", 0) or 0
    if is_everywhere(host):
        raise ValueError(f"rendezvous endpoint {parameters.endpoint!r} would listen on every network; name one address")
    if parameters.min_nodes != nodes:
        raise ValueError(
            f"{parameters.min_nodes} to {nodes} nodes: this rendezvous takes a fixed number. A number that changes "
            "needs the backend c10d, which listens on every interface and unpickles (SECURITY.md)"
        )
    if nodes > 1 and port == 0:
        raise ValueError(f"rendezvous endpoint {parameters.endpoint!r} has no port, but {nodes} nodes need one to meet")
    if not 0 <= node < nodes:
        raise ValueError(f"rank={node} must be the number of this node, from 0 to {nodes - 1}")
    timeout_s = float(parameters.get_as_int("timeout", 600) or 600)
    return BoundRendezvous(host=host, port=port, node=node, nodes=nodes, run_id=parameters.run_id, timeout_s=timeout_s)
