"""The server of the simulation: the pure core, with lists for the network and for the journal."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from asyncrl.errors import FencedError, ReplayError
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.replay.core.requests.rollouts import UnknownPeer
from asyncrl.replay.core.run import Run
from asyncrl.types import NO_VERSION, Assignment

from .model import Model

HEARTBEAT_TIMEOUT_S = 10.0
ONCE = ("acquire", "insert", "trained", "restore")
"""Verbs whose answer the server remembers for repeated requests; see `asyncrl.replay.server.handlers.ONCE`."""


@dataclass(slots=True, eq=False)
class Request:
    client: Client
    number: int
    verb: str
    arguments: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Client:
    """One incarnation of a worker or of the learner."""

    name: str
    incarnation: str
    alive: bool = True
    welcome: bool = False
    boot: int = 0
    """Boot number of the server that answered its `hello`."""
    numbers: int = 0
    open: dict[int, Request] = field(default_factory=dict)
    # worker
    served: int = NO_VERSION
    tasks: list[tuple[Assignment, list[int]]] = field(default_factory=list)
    # learner
    next_step: int = 0
    version: int = NO_VERSION
    phase: str = "restore"
    plan: tuple[int, ...] = ()
    branch: bool = False
    """True if the checkpoint to resume from was chosen by hand."""


class VirtualServer:
    """Requests wait in `network`. Replies wait in `held_back` until a sync covers them, then in `answers`."""

    forgetful = False
    """True in a planted mistake: the server does not remember its answers."""

    def __init__(self, settings: AdmissionSettings, max_bytes: int, random: Random) -> None:
        self.settings, self.max_bytes, self.random = settings, max_bytes, random
        self.journalled = random.random() < 0.7
        """True: evicted payloads are read back from the journal. False: their groups are generated again."""
        self.now = 0.0
        self.faults: dict[str, int] = {}
        self.journal: list[ev.Event] = []
        self.durable = 0
        self.base: tuple[int, dict[str, Any], dict[int, bytes]] | None = None
        """A snapshot of the state: number of events before it, image, payloads."""
        self.network: list[Request] = []
        self.boots = 0
        self.answers: list[tuple[int, Request, Any]] = []
        """Replies on their way to the clients, each with the boot number of the server that sent it."""
        self.held_back: list[tuple[int, Request, Any]] = []
        """Replies that wait for a sync, each with the length of the journal that must be durable."""
        self.remembered: dict[tuple[str, int], Any] = {}
        self._boot()

    def _note(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1

    def _append(self, event: ev.Event) -> None:
        self.journal.append(event)

    def _boot(self) -> None:
        """Recover from the durable state: a snapshot and the events after it, or all events."""
        core = ReplayCore(
            self.settings,
            lambda: self.now,
            max_bytes=self.max_bytes,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            journal=self._append,
        )
        self.model = Model()
        for event in self.journal:
            self.model.apply(event)
        first = 0
        if self.base is not None:
            first, image, payloads = self.base
            core.state.load(copy.deepcopy(image))
            for group_id, payload in payloads.items():
                core.state.ledger.entries[group_id].payload = payload
        for event in self.journal[first:]:
            core.state.apply(event)
        self.model.compare(core.state)
        core.space.stored = self._read_back if self.journalled else None
        self.core = core
        self._watch(core.run)
        self.plant(core)
        if self.journal:
            core.configure(self.settings.plain())
        else:  # a new journal begins with the current settings
            self.began = self.settings
        core.take_over()

    def _watch(self, run: Run) -> None:
        """Compare the state with the model after every event."""
        record = run.record

        def watched(event: ev.Event) -> None:
            record(event)
            self.model.apply(event)
            self.model.compare(run.state)

        run.record = watched

    def plant(self, core: ReplayCore) -> None:
        """Plant a mistake. Overridden by the worlds that the simulation has to catch."""

    def _read_back(self, entry: Entry) -> bytes:
        """Return the payload of the accepted attempt, from the durable journal."""
        self._note("read back")
        kept = (event for event in self.journal[: self.durable] if isinstance(event, ev.Inserted))
        found = {(event.header.group_id, event.header.attempt): event.payload for event in kept}
        return found[entry.group_id, entry.attempt]

    def sync(self) -> None:
        self.durable = len(self.journal)

    def release(self) -> None:
        """Send the replies whose events are durable."""
        ready = [item for item in self.held_back if item[0] <= self.durable]
        self.held_back = [item for item in self.held_back if item[0] > self.durable]
        self.answers += [(self.boots, request, answer) for _, request, answer in ready]

    def snapshot(self) -> None:
        entries = self.core.state.ledger.entries.values()
        payloads = {entry.group_id: entry.payload for entry in entries if entry.payload is not None}
        if self.durable == len(self.journal):
            self.base = (self.durable, copy.deepcopy(self.core.state.image()), payloads)

    def power_loss(self) -> None:
        self._note("power loss")
        self.boots += 1
        del self.journal[self.durable + self.random.randint(0, len(self.journal) - self.durable) :]
        self.durable = len(self.journal)  # The un-synced events that survived by chance are on the disk now.
        self.held_back.clear()
        self.remembered.clear()
        self.network.clear()  # Requests on their way to the dead server are lost with its connections.
        self._boot()

    def deliver(self) -> None:
        """Deliver one of the requests in `network` to the server. Sometimes it stays there and arrives again."""
        if not self.network:
            return
        place = self.random.randrange(len(self.network))
        request = self.network[place]
        if self.random.random() < 0.8:
            del self.network[place]
        if request.verb == "hello" and not request.client.alive:
            return  # The `hello` of a dead process never arrives: its connection was not open yet.
        key = (request.client.incarnation, request.number)
        if key in self.remembered and not self.forgetful:
            self._note("repeated request")
            self.held_back.append((*self.remembered[key][:1], request, self.remembered[key][1]))
            return
        try:
            answer = self._serve(request)
        except (FencedError, UnknownPeer, ReplayError) as error:
            answer = error
        if request.verb in ONCE and not isinstance(answer, Exception):
            self.remembered[key] = (self._promised(request), answer)
        self.held_back.append((self._promised(request), request, answer))

    def _promised(self, request: Request) -> int:
        """Return the number of journal events that must be synced before the answer may be sent."""
        return len(self.journal)

    def _serve(self, request: Request) -> Any:
        client, core, arguments = request.client, self.core, request.arguments
        if request.verb == "hello" and client.name == "learner":
            return core.hello_learner("rank 0", client.incarnation)
        if request.verb == "hello":
            return core.hello(client.name, client.incarnation, client.served)
        if client.name == "learner":
            core.check_rank("rank 0", client.incarnation)
        if request.verb in ("publish", "lease", "trained", "commit"):
            core.check_learner(client.incarnation)
        if request.verb == "served":
            return core.served(client.name, client.incarnation, arguments[0], "f")
        if request.verb == "acquire":
            return core.acquire(client.name, client.incarnation, arguments[0], request.number)
        if request.verb == "fail":
            return core.fail(client.name, client.incarnation, *arguments)
        if request.verb == "insert":
            entry = core.state.held.get(arguments[0].group_id)
            mine = entry and (entry.attempt, entry.incarnation) == (arguments[0].attempt, client.incarnation)
            reply = core.insert(client.name, client.incarnation, *arguments)
            assert mine or reply.status != "accepted", "a fenced group was taken"
            return reply
        if request.verb == "restore":
            step, version, settings, branch = arguments
            return core.restore(
                step=step,
                policy_version=version,
                snapshot=None,
                incarnation=client.incarnation,
                settings=settings,
                branch=branch,
            )
        if request.verb == "lease":
            plan = core.lease(arguments[0])
            if plan is None:
                return None
            entries = [entry for group in plan.groups for entry in core.state.ledger.together(group.group_id)]
            core.bring_back(entries)
            assert all(isinstance(entry.payload, bytes) for entry in entries), "a batch came without its payloads"
            trajectories = sum(len(group.trajectories) for group in plan.groups)
            assert trajectories == sum(len(entry.header.trajectories) for entry in entries if entry.header)
            return tuple(entry.group_id for entry in entries), tuple(sorted(plan.staleness.items()))
        if request.verb == "commit":
            return core.commit(arguments[0])
        names = {"publish": ("policy_version", "parent"), "trained": ("step", "policy_version")}[request.verb]
        return getattr(core, request.verb)(**dict(zip(names, arguments, strict=True)))
