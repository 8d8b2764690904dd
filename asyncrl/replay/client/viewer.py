"""`Viewer`: the client of `asyncrl watch ADDRESS`, with the key of a role that can change nothing."""

from __future__ import annotations

import os
import platform
from concurrent.futures import Future, wait

from asyncrl.replay.client.connection import Connection
from asyncrl.replay.client.requests import Response
from asyncrl.replay.codec.messages import decode_record
from asyncrl.replay.config import ReplayConfig
from asyncrl.replay.net.keyring import VIEWER
from asyncrl.replay.protocol import View


class Viewer:
    """`config`: its `address` and `keys` are used. Raises ConfigError if the viewer's key is missing."""

    def __init__(self, config: ReplayConfig) -> None:
        name = f"{platform.node()[:64]} {os.getpid()}"
        self._connection = Connection(config.address, role=VIEWER, name=name, run_digest="", config=config)
        self._asked: Future[Response] | None = None

    def view(self, wait_s: float) -> View | None:
        """Return the next view; None if it does not arrive within `wait_s` seconds, and then the next call waits for
        the same one.

        Raises:
            AsyncRLError: the server refuses, or has not answered for `wait_timeout_s`.
        """
        asked = self._asked = self._asked or self._connection.request("view")
        wait([asked], wait_s)
        if not asked.done():
            return None
        self._asked = None
        return decode_record(View, asked.result().body)

    def close(self) -> None:
        self._connection.close()
