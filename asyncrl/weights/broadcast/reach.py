"""Who reaches whom: with gloo and nccl each member connects to others that it cannot choose, and one pair that cannot
breaks the group for all. So after an epoch that broke, all try, and as few as possible are left out.

    all          place/N: where N listens
    all          connect to all others, at once; found/N: whom N did not reach, and why
    publisher    over: all have tried
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

from asyncrl.checks.addresses import address_of, own_address
from asyncrl.weights.broadcast.protocol import Peer, fetch, post, pushed, wait_key
from asyncrl.weights.broadcast.wires import Link, address_to_listen

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Seconds that a connection may take, enough for two lost packets."""
_PLACES_S = 2.0
"""Seconds that all have to say where they listen."""
_MARGIN_S = 3.0
_OVER_S = 30.0
"""Seconds after which a member no longer waits for the publisher to say that all have tried."""
MESHED = ("gloo", "nccl")
"""Values of `weights.backend` with which each member may have to connect to each other one."""

Found = Mapping[str, Mapping[str, str]]
"""Name of a member -> whom it did not reach, and why."""


def name_of(peer: Peer) -> str:
    return "/".join(peer)


def _worker(name: str) -> str:
    return name.rpartition("/")[0]


class Round:
    """One try of all.

    Args:
        store: of the publisher.
        names: of all that take part.
    """

    def __init__(self, store: dist.Store, epoch: int, names: Sequence[str]) -> None:
        self._store, self._names = dist.PrefixStore(f"group/{epoch}/reach", store), names

    def take_part(self, name: str, link: Link, stop: threading.Event) -> None:
        """Try to reach all others, and be there for them until all have tried.

        Raises:
            ConfigError: `weights.interface` cannot be used here (gloo).
        """
        with self._try(name, link):
            pushed(self._store, "over", _OVER_S, stop)

    def judge(self, name: str, link: Link, may_leave: Mapping[str, tuple[int, int]]) -> dict[str, str]:
        """Take part as the publisher; returns who has to be left out, see `left_out`."""
        with self._try(name, link):
            deadline, found = time.monotonic() + _PLACES_S + CONNECT_S + _MARGIN_S, {}
            for other in self._names:
                if wait_key(self._store, f"found/{other}", max(deadline - time.monotonic(), 0.0)):
                    found[other] = fetch(self._store, f"found/{other}")
            post(self._store, "over", True)
        return left_out(found, may_leave)

    @contextmanager
    def _try(self, name: str, link: Link) -> Iterator[None]:
        """Tell whom this member does not reach; the others reach it within the context."""
        with ExitStack() as kept:
            try:
                post(self._store, f"place/{name}", _listen(link, kept))
            except OSError as error:  # nobody tries to reach it then, and the group says whether that is so
                log.warning("weights: the others cannot try to connect here: %s", error)
            deadline, places = time.monotonic() + _PLACES_S, {}
            for other in self._names:
                key = f"place/{other}"
                if other != name and wait_key(self._store, key, max(deadline - time.monotonic(), 0.0)):
                    places[other] = fetch(self._store, key)
            post(self._store, f"found/{name}", unreached(places, min(CONNECT_S, link.timeout_s / 2)))
            yield


def _listen(link: Link, kept: ExitStack) -> tuple[str, int]:
    """Listen in the network that the backend uses, until `kept` ends; nobody takes what connects. Returns where."""
    if link.backend == "nccl":
        names = [name for _, name in socket.if_nameindex() if address_of(name)]
        chosen = chosen_by_nccl(names, os.environ.get("NCCL_SOCKET_IFNAME") or link.interface)
        address = address_of(chosen) if chosen else own_address(link.host)
    else:
        address = address_to_listen(link)
    (family, *_), *_ = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    listener = kept.enter_context(socket.create_server((address, 0), family=family, backlog=1024))
    return address, listener.getsockname()[1]


def chosen_by_nccl(names: Sequence[str], given: str) -> str:
    """Return the first interface that nccl uses of these; empty if it uses none. It may be in another network than
    `weights.host`, whose firewall says nothing about nccl.

    Args:
        given: NCCL_SOCKET_IFNAME: prefixes by commas; after `=` whole names, after `^` those that it does not use.
    """
    for rule in (given,) if given else ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        listed = rule.lstrip("^=").split(",")
        exact, wanted = "=" in rule[:2], not rule.startswith("^")
        for name in names:
            if any(name == one if exact else one and name.startswith(one) for one in listed) == wanted:
                return name
    return ""


def unreached(places: Mapping[str, tuple[str, int]], within_s: float) -> dict[str, str]:
    """Connect to all places at once; returns those without a connection after `within_s`, and why."""
    failed: dict[str, str] = {}
    with ExitStack() as kept:
        selector = kept.enter_context(selectors.DefaultSelector())
        for name, (host, port) in places.items():
            try:
                (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                end = kept.enter_context(socket.socket(family, socket.SOCK_STREAM))
                end.setblocking(False)
                code = end.connect_ex((host, port))
            except OSError as error:  # an address of a kind that this machine does not have, or no descriptors left
                failed[name] = f"{host}:{port}: {error.strerror}"
                continue
            if code in (0, errno.EINPROGRESS):
                selector.register(end, selectors.EVENT_WRITE, name)
            else:
                failed[name] = f"{host}:{port}: {os.strerror(code)}"
        deadline = time.monotonic() + within_s
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0.0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # pyright: ignore[reportAttributeAccessIssue]
                if code:
                    failed[key.data] = "{}:{}: {}".format(*places[key.data], os.strerror(code))
        for key in selector.get_map().values():
            failed[key.data] = "{}:{}: no answer in {:g} s".format(*places[key.data], within_s)
    return failed


def left_out(found: Found, may_leave: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Return who has to be left out so that all others reach each other, and why; as few as possible.

    One that reaches only some of the others has many failures, and goes before them; of two that only miss each other,
    the one with the higher rank goes, so that the same one is served each time. (This finds the fewest, if the pairs
    form trees or two parties; otherwise about as few.)

    Args:
        may_leave: the members that may be left out, each with its rank; the senders may not.
    """
    pairs = {
        frozenset((one, other)): f"{_worker(one)} cannot connect to {_worker(other)}, at {why}"
        for one, others in found.items()
        for other, why in others.items()
    }
    out: dict[str, str] = {}
    for pair, why in pairs.items():
        inside = [name for name in pair if name in may_leave]
        if len(inside) == 1:  # the other end is a sender
            out[inside[0]] = why
    left = [pair for pair in pairs if not pair & out.keys() and all(name in may_leave for name in pair)]
    while left:
        gone = _next_out(left, may_leave)
        out[gone] = pairs[next(pair for pair in left if gone in pair)]
        left = [pair for pair in left if gone not in pair]
    return out


def _next_out(pairs: Collection[frozenset[str]], ranks: Mapping[str, tuple[int, int]]) -> str:
    failures = Counter(name for pair in pairs for name in pair)
    # Whoever fails with one that fails with nobody else can go: that covers more than its partner would.
    ends = [pair for pair in pairs if any(failures[name] == 1 for name in pair)]
    candidates = {max(pair, key=lambda name: (failures[name], ranks[name])) for pair in ends} or failures.keys()
    return max(candidates, key=lambda name: (failures[name], ranks[name]))
