"""Look for peers that outlived their server. With `overwrite=true` they decide whether the journal found belongs to an
earlier run, or to the run for which a supervisor has just restarted this server: in that case the run's learner is
present. A worker does not count, as it may be left over from a run that is over.

consumes      messages at the bound sockets; their senders repeat them. A peer that names the run is asked for a hello
waits for     the hello of a learner of that run
unblocked by  that hello, the deadline, or `stop`
"""

from __future__ import annotations

import contextlib
import threading

import zmq

from asyncrl.errors import WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.reply import Hello, decode_hello
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.net.clock import AwakeClock
from asyncrl.replay.server.router import Entrance

TURN_S = 0.2


Survivor = tuple[Hello, Envelope]
"""A peer that said hello, and the envelope, which names its run and incarnation."""


def learner_of(
    run_id: str,
    entrance: Entrance,
    wait_s: float,
    stop: threading.Event,
    clock: AwakeClock,
) -> Survivor | None:
    """Return a learner, identified by its key, of the run `run_id`, or of any run if that is empty. None if none says
    hello within `wait_s` seconds or before `stop` is set."""
    # By the wall clock, a process that was stopped for the whole time would not read the hellos sent meanwhile, and
    # would delete the journal of that run.
    until = clock() + wait_s
    poller = zmq.Poller()
    for socket in entrance.sockets:
        poller.register(socket, zmq.POLLIN)
    while not stop.is_set() and (left := until - clock()) > 0:
        ready = dict(poller.poll(int(min(left, TURN_S) * 1000) + 1))
        peer = _next(run_id, entrance) if entrance.heard(ready) else None
        if peer is not None and peer[0].role == "learner":
            return peer
    return None


def _next(run_id: str, entrance: Entrance) -> Survivor | None:
    """Read one message. Return its sender if it is a hello that names the run; ask other peers of the run for one."""
    try:
        identity, _, role, frames = entrance.receive()
        envelope = wire.decode_envelope(frames[0]) if frames else None
        if envelope is None or not envelope.run or run_id not in ("", envelope.run):
            return None
        if envelope.verb == "hello":
            hello = decode_hello(envelope)
            return (hello, envelope) if hello.role == role else None
    except (zmq.Again, WireError):
        return None
    said = Envelope(
        run=envelope.run, verb="unknown_peer", request=envelope.request, incarnation="", body="say hello first"
    )
    with contextlib.suppress(zmq.ZMQError):  # the peer is gone, or not reading
        entrance.send(identity, [wire.encode_envelope(said)])
    return None
