"""A server in a thread and its clients, over real sockets on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading

from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION
from tests.replay.helpers import close_all, settings


class Clients:
    """Clients of the server of a configuration, as they are asked for."""

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.clients: list[LearnerClient | RolloutClient] = []

    def new_learner(self, rank: int = 0, **options) -> LearnerClient:
        client = LearnerClient(self.config.address, rank=rank, run_digest="d", config=self.config, **options)
        self.clients.append(client)
        return client

    def worker(self, name: str = "w", **options) -> RolloutClient:
        client = RolloutClient(self.config.address, worker=name, run_digest="d", config=self.config, **options)
        self.clients.append(client)
        return client

    def close(self) -> None:
        close_all(self.clients)


class Run(Clients):
    """With a client of the learner from the beginning."""

    def __init__(self, config, admission=None, **learner) -> None:
        super().__init__(config)
        self.admission = admission or settings()
        self.learner = self.new_learner(**learner)

    def start(self) -> int:
        version = self.learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_version
        self.learner.publish(policy_version=version, parent=NO_VERSION)
        return version


async def ready(client: RolloutClient, slots: int = 4):
    client.rendezvous().served(0, "f")
    return (await client.acquire(slots=slots, wait_s=30)).assignments


class Proxy:
    """A TCP proxy between clients and server that cuts all connections from time to time."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._closed = threading.Event()
        self.dropped = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # The server does not listen yet; the client will try again.
                    near.close()
                    continue
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            end.close()

    def keep_dropping(self) -> None:
        """Cut the connections at growing intervals, so that even on a slow machine some messages get through."""
        pause_s = 0.2
        while not self._closed.wait(pause_s):
            self.dropped += self._cut()
            pause_s = min(1.3 * pause_s, 5.0)

    def _cut(self) -> bool:
        cut, self._sockets = self._sockets, []
        for end in cut:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        return bool(cut)

    def close(self) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # Closing alone would not wake a thread in accept.
        self._listener.close()
        self._cut()
