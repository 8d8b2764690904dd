from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from asyncrl.checks.addresses import OF_THE_RANKS, unknown_interfaces
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.weights.broadcast import wires
from asyncrl.weights.broadcast.group import WeightGroup, host_store, publisher_store
from asyncrl.weights.broadcast.wires import Link, address_to_listen
from tests.waiting import until

GPU = torch.device("cuda", 0)
SHORT_S = 0.2
"""Deadline of what never comes back."""
ENOUGH_S = 60.0


class Work:
    """Of a broadcast; what `done` says of it may change, and asking may get stuck."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def is_completed(self) -> bool:
        self._communicator.reach("is_completed")
        return not self._communicator.silent

    def wait(self) -> None:
        self._communicator.reach("wait")
        if self._communicator.broken:
            raise ValueError("a peer's socket closed")


class Communicator:
    """In the place of `dist.ProcessGroupNCCL`, with its options. Any of its calls may never return."""

    stuck = ""
    """The call that does not come back until `freed`."""
    silent = broken = False
    freed = threading.Event()
    calls: ClassVar[list[tuple[str, str]]] = []
    """Name, and the thread that made it."""
    made: ClassVar[list[Communicator]] = []

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=32)

    def __init__(self, store: dist.Store, rank: int, world: int, options: Communicator.Options) -> None:
        self.environment = {name: os.environ.get(name) for name in ("TORCH_NCCL_BLOCKING_WAIT", WATCHDOG)}
        self.options = options
        self.made.append(self)
        self.reach("made")

    def reach(self, call: str) -> None:
        self.calls.append((call, threading.current_thread().name))
        if call == self.stuck:
            assert self.freed.wait(ENOUGH_S)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.reach("connect")

    def broadcast(self, buffers: list[torch.Tensor], options: dist.BroadcastOptions) -> Work:
        self.reach("broadcast")
        return Work(self)

    def abort(self) -> None:
        self.reach("abort")


WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Communicator]]:
    kind = type("Fake", (Communicator,), {"freed": threading.Event(), "calls": [], "made": []})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", kind, raising=False)
    monkeypatch.setattr(wires, "_ABORT_S", ENOUGH_S)
    monkeypatch.setattr(wires, "_MARGIN_S", ENOUGH_S)
    before = set(threading.enumerate())
    yield kind
    kind.freed.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(ENOUGH_S)


def form(timeout_s: float, device: torch.device | None = GPU) -> WeightGroup:
    store = dist.HashStore()
    store.add("group/3/0/formed", 1)  # the other one
    return WeightGroup(
        store,
        Link(backend="nccl", host="127.0.0.1", timeout_s=timeout_s, device=device),
        epoch=3,
        rank=0,
        world=2,
    )


def send(group: WeightGroup, nbytes: int = 100) -> None:
    for piece in group.pieces(torch.zeros(nbytes, dtype=torch.uint8)):
        group.wait(group.broadcast(piece))


def test_every_call_of_a_communicator_is_made_by_one_thread_and_none_has_torchs_watchdog(nccl, monkeypatch):
    monkeypatch.setenv(WATCHDOG, "3")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    group = form(ENOUGH_S)
    send(group)
    group.abort()
    assert [call for call, _ in nccl.calls] == ["made", "connect", "broadcast", "is_completed", "wait", "abort"]
    assert {thread for call, thread in nccl.calls if call != "abort"} == {"weights-nccl"}
    (made,) = nccl.made
    assert made.environment == {"TORCH_NCCL_BLOCKING_WAIT": "1", WATCHDOG: "0"}, "of the weights' group"
    assert os.environ[WATCHDOG] == "3" and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ, (
        "those of the ranks have theirs"
    )
    assert made.options.config.max_ctas < 32, "room on the GPU for the kernels of the ranks"


@pytest.mark.parametrize("stuck", ["made", "connect"])
def test_forming_with_a_member_that_never_comes_ends_at_the_deadline(nccl, stuck):
    nccl.stuck = stuck
    with pytest.raises(RuntimeError, match=r"waited 0\.2 s for nccl to form: a member is gone or silent"):
        form(SHORT_S)
    nccl.freed.set()
    late = "one that forms after all is left at once: nobody waits for it"
    until(lambda: ("abort", "weights-nccl") in nccl.calls, late, within_s=ENOUGH_S)


def formed_with_little_patience() -> WeightGroup:
    """For what comes then: to form, a busy machine may take as long as it likes."""
    group = form(ENOUGH_S)
    group.timeout_s = SHORT_S
    return group


@pytest.mark.parametrize("stuck", ["broadcast", "is_completed", "wait"])
def test_a_call_that_never_returns_ends_the_epoch_and_nothing_else(nccl, monkeypatch, stuck):
    group = formed_with_little_patience()
    monkeypatch.setattr(wires, "_MARGIN_S", SHORT_S)
    nccl.stuck = stuck
    with pytest.raises(RuntimeError, match=r"for nccl to (take|finish) a broadcast: a member is gone or silent"):
        send(group)
    nccl.stuck = ""
    monkeypatch.setattr(wires, "_MARGIN_S", ENOUGH_S)
    group.abort()
    assert nccl.calls[-1] == ("abort", "weights-nccl-abort"), "by another thread: the first is stuck"
    second = form(ENOUGH_S)
    send(second)
    second.abort()


def test_a_silent_member_is_waited_for_until_the_buffers_deadline(nccl):
    group = form(ENOUGH_S)
    group.timeout_s = 2.0  # enough for what is sent
    nccl.silent = True
    with pytest.raises(RuntimeError, match="a broadcast of nccl did not finish in time"):
        send(group)
    group.abort()


def test_what_nccl_says_of_a_dead_member_is_the_end_of_the_epoch_whatever_its_type(nccl):
    group = form(ENOUGH_S)
    nccl.broken = True
    with pytest.raises(RuntimeError, match="a peer's socket closed"):
        send(group)
    group.abort()


def test_an_abort_that_never_returns_is_left_behind_with_a_word(nccl, monkeypatch, caplog):
    group = form(ENOUGH_S)
    monkeypatch.setattr(wires, "_ABORT_S", SHORT_S)
    nccl.stuck = "abort"
    group.abort()
    group.abort()
    assert caplog.text.count("a communicator could not be closed: waited 0.2 s for nccl to abort") == 1


@pytest.mark.parametrize("device", [None, torch.device("cuda")])
def test_a_gpu_without_a_number_is_refused(nccl, device):
    with pytest.raises(RuntimeError, match="nccl needs the number of its GPU, but was given"):
        form(ENOUGH_S, device)
    assert not nccl.made


@pytest.mark.parametrize(
    ("interface", "host", "environment", "found"),
    [
        ("", "127.0.0.1", "", "127.0.0.1"),
        ("", "127.0.0.1", "eth0", "127.0.0.1"),  # what stays on this machine is not opened to others
        ("eth1,eth2", "127.0.0.1", "eth0", "10.0.1.7"),
        ("", "10.0.0.6", "", "10.0.0.7"),
        ("", "10.0.0.6", "eth0", "10.0.1.7"),
        ("", "10.0.0.6", "lo", "10.0.0.7"),  # set by the learner, for its own ranks
        ("eth1", "10.0.0.6", "eth0", "10.0.1.7"),
        ("", "fd00::6", "eth0", "fd00::7"),  # not by the IPv4 address of eth0
        ("eth1,eth0", "fd00::6", "", "10.0.1.7"),
    ],
)
def test_sockets_listen_at_the_named_interface_or_the_one_that_leads_to_the_publisher(
    monkeypatch, interface, host, environment, found
):
    monkeypatch.setattr(wires, "own_address", lambda towards: towards.replace("0.6", "0.7").replace(":6", ":7"))
    monkeypatch.setattr(wires, "interface_of", {"10.0.0.7": "eth0", "fd00::7": "eth0"}.__getitem__)
    monkeypatch.setattr(wires, "unknown_interfaces", lambda given: [])
    monkeypatch.setattr(wires, "address_of", lambda name: "10.0.1.7")
    assert address_to_listen(interface, host, {"GLOO_SOCKET_IFNAME": environment} if environment else {}) == found
    if environment:  # the ranks may meet on another network than the one that leads to the workers
        ours = {"GLOO_SOCKET_IFNAME": environment, OF_THE_RANKS: environment}
        assert address_to_listen(interface, host, ours) == address_to_listen(interface, host, {})


def test_a_named_interface_is_taken():
    store, _ = host_store("127.0.0.1", ENOUGH_S)
    link = Link(host="127.0.0.1", timeout_s=ENOUGH_S, interface="lo")
    group = WeightGroup(store, link, epoch=1, rank=0, world=1)
    send(group)
    group.abort()


def test_an_interface_that_is_not_there_is_refused_where_it_is_used_and_nccls_own_language_is_not():
    store, _ = host_store("127.0.0.1", ENOUGH_S)
    with pytest.raises(ConfigError, match=r"names eth77, which is not a network interface of .* It has lo"):
        WeightGroup(
            store,
            Link(host="127.0.0.1", timeout_s=SHORT_S, interface="eth77"),
            epoch=1,
            rank=0,
            world=2,
        )
    assert unknown_interfaces("lo,eth77,l") == ["eth77", "l"]
    assert unknown_interfaces("l,^docker,=lo,eth77", nccl=True) == ["eth77"]


def test_an_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wires, "address_of", lambda name: "")
    with pytest.raises(ConfigError, match=r"names lo, which has no IPv4 address on .* leads to 127\.0\.0\.1"):
        address_to_listen("lo", "127.0.0.1", {})


def test_a_learner_that_cannot_listen_says_which_setting_is_wrong():
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(WeightsError, match=f"weights.host={host} weights.port=0: the learner cannot send"):
            publisher_store(host, SHORT_S, 0)
