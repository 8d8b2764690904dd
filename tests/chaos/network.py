"""A relay between the peers and the server, in a thread of the harness: it cuts connections, delays and holds up bytes.

    peers ──▶ settings.address ──▶ relay ──▶ settings.listen ──▶ server

The bytes of one connection keep their order, as with TCP. Bytes in flight on a cut connection are lost. Bytes that a
black hole holds up arrive when it ends, or never if the connection is cut first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from random import Random

CHUNK = 1 << 16
TO_SERVER, TO_PEER = 0, 1
ABORT = struct.pack("ii", 1, 0)
"""Value of SO_LINGER with which `close` sends a reset and discards unsent bytes."""


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


class Network:
    """Listens at `outside` and connects to `inside`, both `tcp://127.0.0.1:port`, until it is closed.

    Raises:
        OSError: `outside` is taken.
    """

    def __init__(self, outside: str, inside: str, random: Random) -> None:
        self._random, self._inside = random, port_of(inside)
        self._links: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task] = set()
        self._delay_s = 0.0
        self._holes = (asyncio.Event(), asyncio.Event())
        """One event per direction, set while bytes may pass."""
        for hole in self._holes:
            hole.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._link, "127.0.0.1", port_of(outside))).result(30)

    def cut(self, everybody: bool) -> int:
        """Reset all connections, or a random one. Return the number of connections reset."""
        return self._call(self._cut(everybody)).result(30)

    def delay(self, seconds: float) -> None:
        """From now on delay every chunk of bytes by up to `seconds`."""
        self._delay_s = seconds

    def swallow(self, directions: tuple[int, ...]) -> None:
        """From now on let nothing pass in these directions."""
        for direction in directions:
            self._loop.call_soon_threadsafe(self._holes[direction].clear)

    def mend(self) -> None:
        """End delays and black holes: everything passes at once again."""
        self._delay_s = 0.0
        for hole in self._holes:
            self._loop.call_soon_threadsafe(hole.set)

    def close(self) -> None:
        self._call(self._close()).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def _call(self, coroutine: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a peer until it ends. If the server is down, the connection is aborted, much as it
        would be without the relay."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            inner, onward = await asyncio.open_connection("127.0.0.1", self._inside)
        except OSError:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        link = (writer, onward)
        self._links.append(link)
        try:
            await asyncio.gather(self._pass(reader, onward, TO_SERVER), self._pass(inner, writer, TO_PEER))
        except (OSError, asyncio.CancelledError):
            pass  # One end is gone, by itself or by a cut, so the other is closed too.
        finally:
            self._reset(link)
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int) -> None:
        while data := await reader.read(CHUNK):
            await self._holes[direction].wait()
            if self._delay_s:
                await asyncio.sleep(self._random.random() * self._delay_s)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # ends the other direction too

    async def _cut(self, everybody: bool) -> int:
        links = list(self._links) if everybody or not self._links else [self._random.choice(self._links)]
        for link in links:
            self._reset(link)
        return len(links)

    def _reset(self, link: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        if link in self._links:
            self._links.remove(link)
        for writer in link:
            with contextlib.suppress(OSError, AttributeError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        await self._cut(everybody=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
