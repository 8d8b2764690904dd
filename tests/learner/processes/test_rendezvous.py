"""The rendezvous that listens on one address: rounds of nodes, restarts of ranks, nothing on other interfaces."""

# torch's stores and what of its rendezvous is replaced are not in its `__all__`.
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
    c10d_rendezvous_backend,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from asyncrl.checks import addresses
from asyncrl.cli.processes.ports import free_port
from asyncrl.learner import torchrun
from asyncrl.learner.processes.rendezvous import BACKEND, BoundRendezvous, RoundOverError, make_rendezvous
from tests.sockets import listeners, tree
from tests.waiting import until

HERE = "127.0.0.1"


def node(number: int, nodes: int, port: int = 0, timeout_s: float = 60.0, run_id: str = "r") -> BoundRendezvous:
    return BoundRendezvous(host=HERE, port=port, node=number, nodes=nodes, run_id=run_id, timeout_s=timeout_s)


def one_that_dies(port: int) -> BoundRendezvous:
    """Node 1 of 3, which takes its seat and waits for nobody."""
    dies = node(1, 3, port)
    dies._meeting = dies._open_meeting()
    dies._timeout_s = 0.0
    return dies


def together(*nodes: BoundRendezvous) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(nodes)) as threads:
        return list(threads.map(BoundRendezvous.next_rendezvous, nodes))


def ports(infos: list[RendezvousInfo]) -> set[int]:
    return {info.bootstrap_store_info.master_port for info in infos if info.bootstrap_store_info}


def of_this_process() -> set[int]:
    return {each.port for each in listeners([psutil.Process()]) if not each.on_loopback}


def test_one_node_listens_on_loopback_alone_and_ranks_of_the_next_round_find_an_empty_store() -> None:
    before = of_this_process()
    alone = node(0, 1)
    (first,) = ports([alone.next_rendezvous()])
    TCPStore(HERE, first, is_master=False).set("address of a rank", "that died")
    assert of_this_process() == before
    (second,) = ports([alone.next_rendezvous()])
    assert not TCPStore(HERE, second, is_master=False).check(["address of a rank"])
    assert alone.num_nodes_waiting() == 0


def test_nodes_follow_the_one_whose_ranks_died_into_the_next_round() -> None:
    port = free_port()
    nodes = [node(number, 3, port) for number in range(3)]
    infos = together(*nodes)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    assert len(ports(infos)) == 1, "the ranks of one round meet in one store"
    infos[2].store.set("shared", "by all")
    assert infos[0].store.get("shared") == b"by all"
    assert [each.num_nodes_waiting() for each in nodes] == [0, 0, 0]
    with ThreadPoolExecutor(3) as threads:
        leading = threads.submit(nodes[1].next_rendezvous)  # its ranks died
        until(lambda: nodes[0].num_nodes_waiting() and nodes[2].num_nodes_waiting())
        assert not leading.done(), "a round is of all nodes"
        rest = [threads.submit(nodes[number].next_rendezvous) for number in (0, 2)]
        again = [leading.result(60), *(each.result(60) for each in rest)]
    assert not again[0].store.check(["shared"]), "a store that has seen nothing yet"
    assert ports(again) != ports(infos)
    assert [each.num_nodes_waiting() for each in nodes] == [0, 0, 0]


def test_a_start_of_several_nodes_has_an_id_of_its_own_which_restarts_keep() -> None:
    host = node(0, 2, free_port())
    other, later = (node(1, 2, host._port, run_id=word) for word in ("r", "other"))
    together(host, other)
    name = host.get_run_id()
    assert name == other.get_run_id() and name.startswith("r-")
    together(host, later)  # a node that replaces a dead one
    assert [host.get_run_id(), later.get_run_id()] == [name, name]
    again = node(0, 2, free_port())
    together(again, node(1, 2, again._port))
    assert again.get_run_id() != name
    alone = node(0, 1)  # `asyncrl local` restarts its torchrun under the same id
    together(alone)
    assert alone.get_run_id() == "r"


def test_the_host_of_what_others_read_leaves_last() -> None:
    host = node(0, 3, free_port())
    others = [node(number, 3, host._port) for number in (1, 2)]
    together(host, *others)
    with ThreadPoolExecutor(1) as threads:
        leaves = threads.submit(host.leave)
        others[0].leave()
        with pytest.raises(FutureTimeout):
            leaves.result(0.3)
        others[1].leave()
        leaves.result(5.0)
    node(0, 1).leave()


def test_a_host_does_not_wait_for_ever_for_one_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.learner.processes.rendezvous._LEAVE_S", 0.2)
    host = node(0, 2, free_port())
    together(host, node(1, 2, host._port))
    host.leave()


def test_a_node_that_was_started_again_takes_the_seat_of_the_dead_one_even_while_others_wait() -> None:
    port = free_port()
    first, last = node(0, 3, port), node(2, 3, port)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(first.next_rendezvous)]
        until(lambda: seated(first))
        dies = one_that_dies(port)
        with pytest.raises(RendezvousTimeoutError, match=r"node\(s\) 2 of 3"):
            dies.next_rendezvous()
        again = node(1, 3, port)  # knows nothing of the rounds before
        waiting.append(threads.submit(again.next_rendezvous))
        until(lambda: dies.num_nodes_waiting())  # it has opened the next round
        waiting.append(threads.submit(last.next_rendezvous))
        assert [each.result(60).rank for each in waiting] == [0, 1, 2]
    assert [each.num_nodes_waiting() for each in (first, again, last)] == [0, 0, 0]
    # And in the middle of a run.
    assert [info.rank for info in together(node(2, 3, port), first, again)] == [2, 0, 1]


def test_of_two_nodes_with_one_number_the_first_ends() -> None:
    port = free_port()
    host, first, second = node(0, 2, port), node(1, 2, port), node(1, 2, port)
    together(host, first)
    with ThreadPoolExecutor(2) as threads:
        replaced = threads.submit(second.next_rendezvous)
        until(lambda: host.num_nodes_waiting() and first.num_nodes_waiting() and seated(second))
        with pytest.raises(RendezvousStateError, match="node 1 was started a second time"):
            first.next_rendezvous()
        assert [threads.submit(host.next_rendezvous).result(60).rank, replaced.result(60).rank] == [0, 1]
    assert [each.num_nodes_waiting() for each in (host, second)] == [0, 0]


def test_who_met_in_a_round_with_a_dead_node_follows_the_one_that_replaces_it() -> None:
    port = free_port()
    first, last = node(0, 3, port), node(2, 3, port)
    with ThreadPoolExecutor(3) as threads:
        met = threads.submit(first.next_rendezvous)
        until(lambda: seated(first))
        dies = one_that_dies(port)
        with pytest.raises(RendezvousTimeoutError, match=r"node\(s\) 2 of 3"):
            dies.next_rendezvous()
        assert [last.next_rendezvous().rank, met.result(60).rank] == [2, 0]
        replaced = threads.submit(node(1, 3, port).next_rendezvous)
        until(lambda: first.num_nodes_waiting() and last.num_nodes_waiting())
        waiting = [threads.submit(first.next_rendezvous), replaced, threads.submit(last.next_rendezvous)]
        assert [each.result(60).rank for each in waiting] == [0, 1, 2]


def seated(node: BoundRendezvous) -> bool:
    return node._meeting is not None and node._meeting.check([node._seat(node._node)])


def test_who_is_missing_is_said_and_so_is_an_address_of_another_machine() -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"node\(s\) 1, 2 of 3"):
        node(0, 3, free_port(), timeout_s=1.0).next_rendezvous()
    elsewhere = BoundRendezvous(host="192.0.2.77", port=0, node=0, nodes=1, run_id="r", timeout_s=1.0)
    with pytest.raises(RendezvousConnectionError, match="address of node 0's own machine"):
        elsewhere.next_rendezvous()


def parameters(endpoint: str, nodes: int = 1, least: int | None = None, **more: object) -> RendezvousParameters:
    return RendezvousParameters(BACKEND, endpoint, "r", nodes if least is None else least, nodes, **more)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (parameters("0.0.0.0:0"), "every network"),
        (parameters("0:29400"), "every network"),
        (parameters("[::]:29400"), "every network"),
        (parameters("127.0.0.1:29400", nodes=4, least=1), "c10d"),
        (parameters("127.0.0.1:0", nodes=2), "no port"),
        (parameters("127.0.0.1:29400", nodes=2, rank="2"), "from 0 to 1"),
    ],
)
def test_what_would_listen_everywhere_or_never_meet_is_refused(given: RendezvousParameters, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_rendezvous(given)


RANK = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from asyncrl.learner.processes.launcher import ENDED, tell
from asyncrl.learner.backends.factory import group_interfaces
from tests.sockets import listeners, tree

folder, start = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert os.environ["ASYNCRL_LAUNCHER"] == str(os.getppid()), "or it could not tell when that is gone"
os.environ.update(group_interfaces(os.environ, "127.0.0.1"))
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank = dist.get_rank()
(folder / f"{rank}-{os.getpid()}").write_text(f"{int(total)}")
while not (folder / "end").exists():
    time.sleep(0.05)
dist.all_reduce(total)
dist.destroy_process_group()  # or who leaves first may abort the other, with a thread of gloo in its last exchange
tell(ENDED)
"""


@pytest.fixture
def start_torchrun(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "tmp").mkdir()
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "asyncrl.learner.torchrun", "--nproc-per-node=2", "--rdzv-id=r"]
        command += ["--rdzv-backend=bound", "--log-dir=/dev/null", *options, str(script), str(tmp_path / "ranks")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
        with (tmp_path / f"torchrun-{len(started)}.log").open("wb") as sink:
            started.append(subprocess.Popen(command, env=environment, stdout=sink, stderr=sink))
        return started[-1]

    yield start
    for process in started:
        below = tree(process.pid)
        process.kill()
        process.wait()
        kill_all(below)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def ranks_up(folder: Path, count: int, world: int) -> dict[int, int]:
    """pid -> rank of those that have met `world` others; waits until `count` have in all."""
    until(lambda: len([p for p in folder.glob("*-*") if p.read_text()]) >= count, within_s=200)
    assert {path.read_text() for path in folder.glob("*-*")} == {str(world)}
    return {int(pid): int(rank) for rank, _, pid in (path.name.partition("-") for path in folder.glob("*-*"))}


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(500)
def test_torchrun_restarts_killed_ranks_listens_on_loopback_and_leaves_no_folder(
    start_torchrun: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    folder = tmp_path / "ranks"
    torchrun = start_torchrun("--max-restarts=2", "--rdzv-endpoint=127.0.0.1:0")
    met = ranks_up(folder, 2, world=2)
    for victim in (0, 1):  # either: neither hosts what the others need
        held = listeners(tree(torchrun.pid))
        assert {each.on_loopback for each in held} == {True}
        (pid,) = [pid for pid, rank in met.items() if rank == victim and psutil.pid_exists(pid)]
        os.kill(pid, signal.SIGKILL)
        met = ranks_up(folder, len(met) + 2, world=2)
    (folder / "end").touch()
    assert torchrun.wait(120) == 0, (tmp_path / "torchrun-0.log").read_text()
    assert not [each.name for each in (tmp_path / "tmp").iterdir() if each.name.startswith("torchelastic")]


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(500)
def test_two_machines_restart_their_ranks_together_and_end_when_the_first_is_gone(
    start_torchrun: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    folder, endpoint = tmp_path / "ranks", f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    machines = [start_torchrun("--nnodes=2", "--max-restarts=1", endpoint, f"--rdzv-conf=rank={n}") for n in (1, 0)]
    met = ranks_up(folder, 4, world=4)
    for machine in machines:
        assert {each.on_loopback for each in listeners(tree(machine.pid))} <= {True}
    (victim,) = [pid for pid, rank in met.items() if rank == 3]
    os.kill(victim, signal.SIGKILL)
    ranks_up(folder, 8, world=4)
    below = tree(machines[1].pid)
    machines[1].kill()
    assert machines[0].wait(120) != 0, "without the machine that hosts the stores nobody can go on"
    kill_all(below)  # ranks of this script know nothing of their launcher's death, as asyncrl's do


def test_a_start_of_torch_s_own_has_an_id_of_its_own_which_those_that_join_get_too() -> None:
    def named(port: int, machines: int) -> set[str]:
        given = RendezvousParameters("c10d", f"{HERE}:{port}", "word", 1, 4, local_addr=HERE)
        met = [get_rendezvous_handler(given) for _ in range(machines)]
        for each in (*met, met[0]):  # the first again, as at a restart
            torchrun.name_start(each)
        return {each.get_run_id() for each in met}

    (first,), (second,) = named(free_port(), 2), named(free_port(), 1)
    assert first.startswith("word-") and second.startswith("word-") and first != second


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_machine_that_dies_between_meeting_and_ranks_holds_up_neither_the_end_nor_its_successor(
    start_torchrun: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """torch's first wait of the ranks, which a signal does not end: there the others stood until its timeout."""
    port = free_port()
    first = start_torchrun("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=rank=0")
    assert node(1, 2, port).next_rendezvous().rank == 1  # and now this machine is lost
    second = start_torchrun("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=rank=1")
    met = ranks_up(tmp_path / "ranks", 4, world=4)
    second.send_signal(signal.SIGTERM)
    second.wait(60)
    kill_all(psutil.Process(pid) for pid in met if psutil.pid_exists(pid))
    dies = node(1, 2, port)
    assert dies.next_rendezvous().rank == 1
    first.send_signal(signal.SIGTERM)
    assert first.wait(20) != 0
    assert "torchrun: ended by SIGTERM" in (tmp_path / "torchrun-0.log").read_text()


def test_reads_of_a_round_end_with_the_round_and_at_the_deadline() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as threads:
        first, second = node(0, 2, port, 2.0), node(1, 2, port, 2.0)
        met = [each.store for each in threads.map(BoundRendezvous.next_rendezvous, (first, second))]
        met[1].set("here", "b")
        assert met[0].get("here") == b"b" and met[0].multi_get(["here"]) == [b"b"]
        with pytest.raises(RendezvousTimeoutError, match="waited 2 s for ranks/1"):
            met[0].multi_get(["here", "ranks/1"])
        waiting = threads.submit(met[0].get, "never")
        opened = threads.submit(node(1, 2, port, 2.0).next_rendezvous)
        with pytest.raises(RoundOverError):
            waiting.result(30)
        with pytest.raises(RendezvousTimeoutError, match=r"node\(s\) 0 of 2"):
            opened.result(30)


def test_torch_s_own_finds_machines_by_their_addresses_and_not_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /etc/hosts has this machine's name as 127.0.1.1."""
    asks_its_name = c10d_rendezvous_backend._matches_machine_hostname
    assert not asks_its_name("10.0.0.6")
    for module in (torchrun, addresses):
        monkeypatch.setattr(module, "own_address", {"10.0.0.6": "10.0.0.6", "10.0.0.7": "10.0.0.6"}.__getitem__)
    monkeypatch.setattr(c10d_rendezvous_backend, "_matches_machine_hostname", lambda _: False)
    torchrun.host_by_address()
    hosts = c10d_rendezvous_backend._matches_machine_hostname
    assert hosts("10.0.0.6") and not hosts("10.0.0.7")

    elastic = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.7:29400", "-m", "asyncrl.learner", "--local-addr=x"]
    assert torchrun.by_address(elastic) == ["--local-addr=10.0.0.6", *elastic]
    for left in (["--local-addr=eth", *elastic], ["--rdzv-backend=bound", *elastic[1:]], elastic[:1], []):
        assert torchrun.by_address(left) == left
