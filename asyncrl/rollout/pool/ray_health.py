"""Detects the loss of the Ray that the workers run on. Ray does not report it: if a raylet dies its actors continue,
and new actors wait silently; if the head dies, Ray ends the calling process after a minute.

consumes:     the list of nodes, requested in a thread; the processes of a Ray that was started here
waits for:    Ray's answer, in the thread only
unblocked by: the answer; `SILENCE_S` without one counts as a loss
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import psutil
import ray

from asyncrl.rollout.host import HostLostError
from asyncrl.utils.process_tree import command_of, descendants, is_alive

ASK_S = 2.0
SILENCE_S = 30.0
"""Ray itself ends a process whose requests were not answered for 60 s, with a message of its own."""
SERVERS = ("gcs_server", "raylet")
"""Programs without which Ray does not work."""


class RayHealth:
    """Checks that Ray is alive, with a thread that queries its nodes.

    Args:
        address: `ray.address`; empty if this process started Ray, whose servers are then its descendants.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._servers = {} if address else _servers_of(os.getpid())
        self._lock = threading.Lock()
        self._answered_at = time.monotonic()
        self._looked_at = time.monotonic()
        self._dead = ""
        self._nodes: dict[str, bool] = {}
        self._news: list[str] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="ray-health", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check for a loss; to be called about once a second. Raises HostLostError."""
        for process, name in self._servers.items():
            if not is_alive(process):
                raise self._lost(f"{name} (pid {process.pid}) of the Ray that this pool had started is gone")
        now = time.monotonic()
        with self._lock:
            if now - self._looked_at > SILENCE_S / 2:  # this process was suspended, so it received no answers
                self._answered_at = now
            self._looked_at = now
            silent_s, dead = now - self._answered_at, self._dead
        if dead:
            raise self._lost(dead)
        if silent_s > SILENCE_S:
            raise self._lost(f"the head of the Ray cluster (gcs_server) has not answered for {silent_s:.0f} s")

    def news(self) -> list[str]:
        """On a cluster: nodes that joined or were lost since the last call."""
        with self._lock:
            news, self._news = self._news, []
        return news if self._address else []

    def close(self) -> None:
        """Called before Ray is shut down: a request without a running Ray would start another one."""
        self._closed.set()
        self._thread.join(ASK_S)

    def _ask(self) -> None:
        while not self._closed.wait(ASK_S):
            try:
                nodes = ray.nodes()
            # The boundary of a thread, in which the end of Ray can appear as any exception; only the silence counts.
            except Exception:
                continue
            with self._lock:
                self._answered_at = time.monotonic()
                gone = [node.get("NodeManagerAddress", "?") for node in nodes if not node.get("Alive")]
                self._news += self._changed(nodes)
                none_left = bool(nodes) and len(gone) == len(nodes)
                self._dead = f"every node of the Ray cluster is dead ({', '.join(gone)})" if none_left else ""

    def _changed(self, nodes: list[dict[str, Any]]) -> list[str]:
        """Nodes present at the first check, and nodes that died before it, are not news."""
        before, lines = self._nodes, []
        self._nodes = {str(node.get("NodeID")): bool(node.get("Alive")) for node in nodes}
        for node in nodes if before else []:
            known, alive = before.get(str(node.get("NodeID")), False), bool(node.get("Alive"))
            if known != alive:
                change = "has joined" if alive else "is gone, and what ran there starts again on other nodes"
                lines.append(f"node {node.get('NodeManagerAddress', '?')} of the Ray cluster {change}")
        return lines

    def _lost(self, what: str) -> HostLostError:
        if not self._address:
            return HostLostError(f"{what}: its workers are stopped, and Ray is started again", mendable=True)
        way_out = (
            "Repair it (`ray status` on its head), then start this pool again: `asyncrl rollout` with its settings"
        )
        return HostLostError(f"ray.address={self._address}: {what}. {way_out}", mendable=False)


def _servers_of(pid: int) -> dict[psutil.Process, str]:
    named = {process: os.path.basename((command_of(process) or [""])[0]) for process in descendants(pid)}
    return {process: name for process, name in named.items() if name in SERVERS}
