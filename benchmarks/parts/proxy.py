"""Send groups through a bare ZeroMQ proxy: from a producer process through a proxy process to the measuring process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import zmq

from asyncrl import collector
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.codec.group import encode_group, split_frames
from benchmarks.parts.measuring import Row, Size, free_address, make_group, make_trajectories, spawn, started, timed

PIPES = 150
"""Groups that can be under way in the pipes of a proxy, one message each. The measurement starts after so many have
arrived."""
SYSTEM_BUFFER = -1
"""Value of SNDBUF by which ZeroMQ leaves the size of the buffer to the operating system."""


def run_proxy(front: str, back: str, in_python: bool, send_buffer: int) -> None:
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDBUF, send_buffer)
    for end, address in ((pull, front), (push, back)):
        end.set_hwm(64)
        end.bind(address)
    while in_python:
        push.send_multipart(pull.recv_multipart(copy=False), copy=False)
    zmq.proxy(pull, push)


def run_pusher(front: str, size: Size, pickled: bool, send_buffer: int) -> None:
    push = zmq.Context().socket(zmq.PUSH)
    push.set_hwm(64)
    push.setsockopt(zmq.SNDBUF, send_buffer)
    push.connect(front)
    group = make_group(make_trajectories(size))
    collector.wake()  # as the replay's producer does
    while True:
        if pickled:
            push.send(pickle.dumps(group, 5), copy=False)
        else:
            encoded = encode_group(group)
            head = wire.pack(headers.encode_group_header(encoded.header))
            push.send_multipart([head, *encoded.frames], copy=False)


def unpickle(frames: list[zmq.Frame]) -> None:
    pickle.loads(frames[0].buffer)


def decode(frames: list[zmq.Frame]) -> None:
    header = headers.decode_group_header(wire.unpack(frames[0].buffer))
    split_frames(header, [frame.buffer for frame in frames[1:]]).trajectories(header.trajectories)


def measure_proxy(
    size: Size,
    seconds: float,
    use: Callable[[list[zmq.Frame]], None] | None = None,
    in_python: bool = False,
    send_buffer: int = SYSTEM_BUFFER,
    sockets: Path | None = None,
) -> Row:
    """Measure groups per second through a proxy.

    Args:
        use: what the consumer does with the frames of a group.
        in_python: forward the messages in Python instead of by ZeroMQ's proxy in C.
        sockets: folder of the unix sockets to send through; None sends by tcp.
    """
    front, back = free_address(), free_address()
    if sockets is not None:
        front, back = (f"ipc://{sockets}/{end}" for end in ("front", "back"))
    children = [
        spawn.Process(target=run_proxy, args=(front, back, in_python, send_buffer), daemon=True),
        spawn.Process(target=run_pusher, args=(front, size, use is unpickle, send_buffer), daemon=True),
    ]
    with started(children):
        context = zmq.Context()
        pull = context.socket(zmq.PULL)
        pull.set_hwm(64)
        pull.connect(back)

        def take() -> None:
            frames = pull.recv_multipart(copy=False)
            if use is not None:
                use(frames)

        row, groups, cpu = timed(take, seconds, size, warm=PIPES)
        context.destroy(linger=0)
    return row | {"cpu_us_per_group": cpu / groups * 1e6}
