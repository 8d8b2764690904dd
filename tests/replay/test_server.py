"""Server and clients over real sockets on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from asyncrl.errors import ConfigError, FencedError, NoProgress, ReplayError, WireError
from asyncrl.replay import wire
from asyncrl.replay.client import LearnerClient, RolloutClient, wait_for_server
from asyncrl.replay.doorkeeper import MAX_MALFORMED
from asyncrl.replay.meter import RolloutRates
from asyncrl.replay.router import router
from asyncrl.replay.wire import Envelope
from asyncrl.types import NO_VERSION, DropReason, EvalResult
from tests.addresses import free_address

from .cluster import wait_until
from .helpers import SOON_SILENT_S, group, replay_config, running_server, same_trajectory, settings

pytestmark = pytest.mark.timeout(150)


class Run:
    """A server in a thread, a learner client, and workers as they are asked for."""

    def __init__(self, config, admission=None) -> None:
        self.config = config
        self.admission = admission or settings()
        self.learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
        self.clients: list = [self.learner]

    def worker(self, name: str = "w", **options) -> RolloutClient:
        client = RolloutClient(self.config.address, worker=name, run_digest="d", config=self.config, **options)
        self.clients.append(client)
        return client

    def start(self) -> int:
        version = self.learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_version
        self.learner.publish(policy_version=version, parent=NO_VERSION)
        return version

    def close(self) -> None:
        for client in self.clients:
            closed = client.close()
            if closed is not None:
                asyncio.run(closed)


class Proxy:
    """TCP between clients and server that cuts every connection now and then."""

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
                except OSError:  # The server does not listen yet; who asks will come again.
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
        while not self._closed.wait(0.25):
            self.dropped += self._cut()

    def _cut(self) -> bool:
        cut, self._sockets = self._sockets, []
        for end in cut:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        return bool(cut)

    def close(self) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # Closed alone, a thread that waits for a peer would wait on.
        self._listener.close()
        self._cut()


@pytest.fixture
def run():
    config = replay_config()
    with running_server(config, settings()):
        made = Run(config)
        try:
            yield made
        finally:
            made.close()


async def ready(client: RolloutClient, slots: int = 4):
    await client.served(0, "f")
    return (await client.acquire(slots=slots, wait_s=30)).assignments


def test_groups_travel_from_workers_to_the_learner_and_steps_are_committed(run) -> None:
    version = run.start()
    client = run.worker()
    sent = {}

    async def work() -> None:
        for order in await ready(client):
            sent[order.group_id] = group(order, [version] * 3)
            assert (await client.insert(sent[order.group_id])).status == "accepted"

    asyncio.run(work())
    lease = run.learner.lease(step=0, rank=0, world=1, wait_s=30)
    for (position, t), arrived in lease.trajectories.items():
        assert same_trajectory(sent[lease.plan.groups[position].group_id].trajectories[t], arrived)
    assert lease.samples[0].completion_texts == ("answer 0 ü", "answer 1 ü")
    assert lease.plan.groups[0].worker == "w"
    reply = run.learner.trained(step=0, policy_version=1)
    assert reply.metrics["replay/trained"] == 2
    run.learner.commit(step=0)
    assert run.learner.snapshot()["step"] == 0
    assert [member.worker for member in run.learner.members()] == ["w"]


@pytest.mark.slow
def test_silent_peers_are_named_by_the_others(caplog) -> None:
    """As a stopped process is: its thread neither speaks nor says goodbye."""
    config = replay_config(heartbeat_timeout_s=SOON_SILENT_S)
    with running_server(config, settings()):
        run = Run(config)
        run.start()
        worker, watcher = run.worker("mute"), run.worker("watcher")
        asyncio.run(ready(worker))
        asyncio.run(watcher.served(0, "f"))
        for client in (worker, run.learner):
            client._connection._closing.set()
        wanted = ("worker mute was silent for", "learner rank 0 was silent for")
        wait_until(lambda: all(text in caplog.text for text in wanted))
    wait_until(lambda: "no word from the replay server" in caplog.text)
    asyncio.run(watcher.close())


def test_an_insert_sent_twice_is_stored_once(run) -> None:
    version = run.start()
    client = run.worker()

    async def work() -> list[str]:
        made = group((await ready(client))[0], [version])
        return [(await client.insert(made)).status for _ in range(2)]

    assert asyncio.run(work()) == ["accepted", "duplicate"]


def test_a_zombie_is_fenced_and_its_group_goes_to_the_successor(run) -> None:
    version = run.start()
    zombie = run.worker()

    async def work() -> None:
        order = (await ready(zombie, 1))[0]
        successor = run.worker()
        again = (await ready(successor, 1))[0]
        assert (again.group_id, again.attempt) == (order.group_id, 1)
        with pytest.raises(FencedError):
            await zombie.insert(group(order, [version]))
        with pytest.raises(FencedError):
            await zombie.acquire(slots=1, wait_s=0)
        assert (await successor.insert(group(again, [version]))).status == "accepted"

    asyncio.run(work())


def test_a_dead_worker_s_assignments_go_to_another() -> None:
    config = replay_config(heartbeat_timeout_s=SOON_SILENT_S)
    with running_server(config, settings()), contextlib.closing(Run(config)) as run:
        dies(run)


def dies(run: Run) -> None:
    run.start()
    dying, other = run.worker("dying"), run.worker("other")

    async def work() -> None:
        (order,) = await ready(dying, 1)
        dying._connection._closing.set()  # Stops its thread without a goodbye, as a kill would.
        await other.served(0, "f")
        taken = []
        deadline = time.monotonic() + 40
        while order.group_id not in taken and time.monotonic() < deadline:
            taken += [o.group_id for o in (await other.acquire(slots=8, wait_s=0.5)).assignments]
        assert order.group_id in taken

    asyncio.run(work())


def test_requests_outlive_connections_that_drop() -> None:
    """Whatever was on the way is lost, requests and replies; everything is asked again and runs once."""
    server_config = replay_config()
    proxy = Proxy(server_config.address)
    with running_server(server_config, settings(groups_per_step=8, pipeline_depth=2)):
        run = Run(replay_config(address=proxy.address))
        run.start()
        client = run.worker()

        async def work() -> None:
            await client.served(0, "f")
            while not (acquired := await client.acquire(slots=8, wait_s=0.3)).stop:
                made = [group(order, [order.policy_version] * 3) for order in acquired.assignments]
                replies = await asyncio.gather(*(client.insert(one) for one in made))
                assert {reply.status for reply in replies} <= {"accepted", "duplicate"}
                newest = (await client.watch(revision=-1, wait_s=0)).values.get("version", 0)
                await client.served(newest, "f")

        thread = threading.Thread(target=lambda: asyncio.run(work()))
        thread.start()
        dropper = threading.Thread(target=proxy.keep_dropping)
        dropper.start()
        seen: list[int] = []
        step = 0
        while proxy.dropped < 6:
            plan = run.learner.lease(step=step, rank=0, world=1, wait_s=20).plan
            seen += [header.group_id for header in plan.groups]
            metrics = run.learner.trained(step=step, policy_version=step + 1).metrics
            run.learner.announce({"version": step + 1})
            run.learner.commit(step=step)
            step += 1
        run.learner.finish()
        thread.join(40)
        run.close()
        proxy.close()
        dropper.join(20)
        assert not thread.is_alive()
        assert len(seen) == len(set(seen)) == 8 * step
        assert metrics["replay/trained"] == 8 * step
        assert not [name for name in metrics if name.startswith("replay/dropped")]


def test_a_server_that_comes_late_is_waited_for() -> None:
    config = replay_config()
    learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
    time.sleep(0.3)
    with running_server(config, settings()):
        assert learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_step == 0
        wait_for_server(config.address, config=config, run_digest="d", wait_s=30)
        learner.close()


def test_a_server_that_never_comes_is_named_in_the_error() -> None:
    config = replay_config(wait_timeout_s=0.4)
    learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
    with pytest.raises(NoProgress, match=config.address):
        learner.members()
    learner.close()
    with pytest.raises(NoProgress, match=config.address):
        wait_for_server(config.address, config=config, run_digest="d", wait_s=0.3)


def test_a_worker_of_a_restarted_server_is_told_to_start_anew() -> None:
    config = replay_config()
    client = RolloutClient(config.address, worker="w", run_digest="d", config=config)
    with running_server(config, settings()):
        asyncio.run(client.watch(revision=-1, wait_s=0))
    with running_server(config, settings()):
        with pytest.raises(FencedError, match="restarted"):
            asyncio.run(client.acquire(slots=1, wait_s=30))
        asyncio.run(client.close())


def test_a_peer_with_other_settings_is_refused_with_both_digests(run) -> None:
    stranger = LearnerClient(run.config.address, rank=0, run_digest="other", config=run.config)
    with pytest.raises(ReplayError, match="digest other there, d here"):
        stranger.members()
    stranger.close()
    with pytest.raises(ReplayError):
        stranger.members()


def test_long_polls_answer_at_once_when_there_is_something_and_at_their_deadline_otherwise(run) -> None:
    client = run.worker()

    async def work() -> None:
        start = time.monotonic()
        nothing = await client.acquire(slots=1, wait_s=0.3)
        assert 0.25 < time.monotonic() - start < 30
        assert "not published" in nothing.waiting_for
        board = await client.watch(revision=0, wait_s=0.2)
        assert board.revision == 0
        start = time.monotonic()
        pending = asyncio.create_task(client.acquire(slots=1, wait_s=55))
        watching = asyncio.create_task(client.watch(revision=0, wait_s=55))
        await asyncio.to_thread(run.start)
        await client.served(0, "f")
        assert len((await pending).assignments) == 1
        await asyncio.to_thread(run.learner.announce, {"a": [1, "b"]})
        assert (await watching).values == {"a": [1, "b"]}
        assert time.monotonic() - start < 50, "both would have waited for an answer until their deadline"

    asyncio.run(work())


def test_a_lease_that_gets_no_group_says_whom_it_waited_for(run) -> None:
    run.start()
    with pytest.raises(NoProgress, match="no rollout worker is connected"):
        run.learner.lease(step=0, rank=0, world=1, wait_s=0.3)


def test_a_step_leased_ahead_is_waited_for_as_long_as_the_learner_trains_the_step_before() -> None:
    config = replay_config()
    with running_server(config, settings(max_staleness=1, pipeline_depth=0)):
        run = Run(config)
        run.start()

        async def make(version: int) -> None:
            worker = run.clients[-1]
            await worker.served(version, "f")
            made, deadline = 0, time.monotonic() + 30
            while made < settings().groups_per_step and time.monotonic() < deadline:
                for order in (await worker.acquire(slots=4, wait_s=30)).assignments:
                    made += (await worker.insert(group(order, [version] * 3))).status == "accepted"

        try:
            run.worker()
            asyncio.run(make(0))
            run.learner.lease(step=0, rank=0, world=1, wait_s=30)
            with ThreadPoolExecutor(1) as pool:
                ahead = pool.submit(run.learner.lease, step=1, rank=0, world=1, wait_s=3.0)
                time.sleep(3.5)  # A train step longer than the patience; no group can arrive in it.
                run.learner.trained(step=0, policy_version=1)
                asyncio.run(make(1))
                assert ahead.result(timeout=30).plan.step == 1
                dry = pool.submit(run.learner.lease, step=2, rank=0, world=1, wait_s=0.3)
                time.sleep(0.5)
                run.learner.trained(step=1, policy_version=2)
                with pytest.raises(NoProgress, match="no group arrived"):
                    dry.result(timeout=30)
        finally:
            run.close()


def test_a_cancelled_acquire_gives_its_orders_back(run) -> None:
    client = run.worker()

    async def work() -> None:
        waiting = asyncio.create_task(client.acquire(slots=4, wait_s=20))
        await asyncio.sleep(0)
        await client.watch(revision=-1, wait_s=0)  # Answered: so what was sent before it is at the server.
        waiting.cancel()
        await asyncio.to_thread(run.start)
        await client.served(0, "f")
        # Answered when those that wait are asked again, the older acquire first: so it has been given its orders.
        await client.watch(revision=(await client.watch(revision=-1, wait_s=0)).revision, wait_s=0.05)
        attempts = {}
        deadline = time.monotonic() + 30
        while len(attempts) < 4 and time.monotonic() < deadline:
            for order in (await client.acquire(slots=4, wait_s=0.5)).assignments:
                attempts[order.group_id] = order.attempt
        # More than 1 where the machine was so busy that the worker was taken for silent.
        assert attempts.keys() == {0, 1, 2, 3} and min(attempts.values()) >= 1

    asyncio.run(work())


def test_evaluation_runs_through_the_same_workers(run) -> None:
    version = run.start()
    client = run.worker()
    job = run.learner.evaluate(step=0, policy_version=version, eval_set="heldout", rows=3, chunk=2)
    with pytest.raises(NoProgress, match="3 rows"):
        run.learner.wait_evaluations(wait_s=0.1)

    async def work() -> None:
        await client.served(0, "f")
        done = 0
        while done < 3:
            for order in (await client.acquire(slots=1, wait_s=30)).evaluations:
                rows = order.stop - order.start
                done += rows
                await client.report_evaluation(
                    EvalResult(
                        job_id=order.job_id,
                        chunk=order.chunk,
                        attempt=order.attempt,
                        policy_version=version,
                        scores=(1.0,) * rows,
                    )
                )

    asyncio.run(work())
    (summary,) = run.learner.wait_evaluations(wait_s=30)
    assert (summary.job_id, summary.count, summary.accuracy) == (job, 3, 1.0)


def test_failures_statistics_and_the_blocking_rendezvous_reach_the_server(run, monkeypatch) -> None:
    monkeypatch.setattr(RolloutRates, "SPAN_S", 0.0)  # Every row has a rate of its own.
    run.start()
    beats: list[float] = []

    def stats() -> dict[str, float]:
        beats.append(time.monotonic())
        return {"generated_tokens": 50.0, "waiting_s": 0.0}

    client = run.worker(stats=stats)
    rendezvous = client.rendezvous()
    rendezvous.served(0, "f")
    assert rendezvous.watch(-1, 0.0).revision == 0

    async def work() -> None:
        order = (await client.acquire(slots=1, wait_s=30)).assignments[0]
        await client.fail(order, DropReason.OVER_LENGTH, "too long")
        while len(beats) < 3:
            await asyncio.sleep(0.02)
        for order in (await client.acquire(slots=2, wait_s=30)).assignments:
            await client.insert(group(order, [0]))

    asyncio.run(work())
    run.learner.lease(step=0, rank=0, world=1, wait_s=30)
    metrics = run.learner.trained(step=0, policy_version=1).metrics
    assert metrics["replay/dropped_over_length"] == 1
    assert metrics["perf/generated_tokens_per_s"] > 0


def test_a_learner_that_was_replaced_is_fenced(run) -> None:
    run.start()
    second = LearnerClient(run.config.address, rank=0, run_digest="d", config=run.config)
    run.clients.append(second)
    with pytest.raises(ReplayError, match="no running learner"):
        second.commit(step=0)
    second.restore(step=None, policy_version=NO_VERSION, snapshot=None)
    with pytest.raises(FencedError):
        run.learner.publish(policy_version=5, parent=0)


def test_byte_credits_hold_a_producer_back_until_there_is_room() -> None:
    config = replay_config(max_bytes=4000)
    admission = settings(groups_per_step=1, pipeline_depth=2, max_staleness=2, group_size=1)
    with running_server(config, admission):
        run = Run(config, admission)
        run.start()
        client = run.worker()

        async def work() -> None:
            orders = await ready(client)
            assert len(orders) == 3
            big = [group(order, [0] * 300, size=1) for order in orders]  # 2.8 KB each
            await client.insert(big[0])
            await asyncio.to_thread(run.learner.lease, step=0, rank=0, world=1, wait_s=30)
            await client.insert(big[1])
            held = asyncio.create_task(client.insert(big[2]))
            await asyncio.sleep(0.5)
            assert not held.done()
            await asyncio.to_thread(run.learner.trained, step=0, policy_version=1)
            await asyncio.to_thread(run.learner.commit, step=0)
            assert (await asyncio.wait_for(held, 40)).status == "accepted"

        asyncio.run(work())
        run.close()


def hostile_frames(rng: random.Random):
    """Mutations of good messages, and plain noise."""
    good = [
        [wire.encode_envelope(Envelope(run="run", verb=verb, request=1, incarnation="evil", body=body)), b"x" * 40]
        for verb, body in (
            ("hello", ["worker", "evil", "d", -1, ""]),
            ("insert", [0, [[0, 0, 0, "w", 80, [[5, 2, 0.0, [0, 3]]]], [[40, 0]]]]),
            ("acquire", [0, [1, 0.0]]),
            ("lease", [0, [0, 0, 1, 0.0, 0]]),
            ("heartbeat", [0, [{}, []]]),
            ("restore", [0, [None, -1, {"schema": 1}]]),
            ("served", [0, [1 << 40, "f"]]),
            ("fail", [0, [[0, 0, 0, 0, 0], "no reason", ""]]),
            ("goodbye", [0, None]),
            ("nonsense", [0, None]),
        )
    ]
    while True:
        frames = [bytearray(frame) for frame in rng.choice(good)]
        for _ in range(rng.randint(0, 3)):
            frame = rng.choice(frames)
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        if rng.random() < 0.2:
            frames[0] = frames[0][: rng.randrange(len(frames[0]))]
        if rng.random() < 0.1:
            frames = [bytearray(rng.randbytes(rng.randrange(60))) for _ in range(rng.randint(1, 5))]
        yield [bytes(frame) for frame in frames]


def test_hostile_frames_leave_the_server_serving(run, caplog) -> None:
    version = run.start()
    client = run.worker()
    context = zmq.Context()
    evil = context.socket(zmq.DEALER)
    evil.setsockopt(zmq.LINGER, 0)
    evil.connect(run.config.address)
    frames = hostile_frames(random.Random(1))
    try:
        evil.send_multipart(next(frames))
        for _ in range(3000):
            evil.send_multipart(next(frames))
            while evil.poll(0):
                evil.recv_multipart()
    finally:
        evil.close()
        context.term()

    async def work() -> None:
        for order in await ready(client):
            assert (await client.insert(group(order, [version]))).status == "accepted"

    asyncio.run(work())
    assert len(run.learner.lease(step=0, rank=0, world=1, wait_s=30).plan.groups) == 2
    complaints = [record.getMessage() for record in caplog.records if "malformed" in record.getMessage()]
    assert len(complaints) > MAX_MALFORMED  # and no more of one connection than that and the word that it is over
    assert any("'evil'" in complaint for complaint in complaints)


def test_a_worker_has_no_learner_verbs(run) -> None:
    client = run.worker()
    with pytest.raises(WireError, match="no verb"):
        client._connection.request("finish").result(timeout=40)


def test_what_cannot_be_packed_fails_its_caller_only(run) -> None:
    with pytest.raises(WireError):
        run.learner.announce({"x": object()})
    run.start()
    with pytest.raises(WireError, match="limit"):
        run.learner.announce({"x": b"0" * (wire.MAX_REQUEST_BYTES + 1)})
    run.learner.announce({"x": 1})


def test_the_server_leaves_when_the_run_is_finished_and_everybody_is_gone() -> None:
    config = replay_config()
    with running_server(config, settings()) as thread:
        run = Run(config)
        run.start()
        client = run.worker()
        asyncio.run(client.served(0, "f"))
        run.learner.finish()
        assert asyncio.run(client.acquire(slots=1, wait_s=30)).stop
        assert thread.is_alive()
        run.close()
        thread.join(40)
        assert not thread.is_alive()


def test_an_open_address_without_keys_is_refused() -> None:
    for address in ("tcp://*:5577", "tcp://0.0.0.0:5577", "tcp://10.1.2.3:5577", "nonsense"):
        with pytest.raises(ConfigError), router(replay_config(address=address)):
            pass


SERVER = """
import sys, threading
from asyncrl.replay.config import ReplayConfig
from asyncrl.replay.admission import AdmissionSettings
from asyncrl.replay.serving import run_server
assert "torch" not in sys.modules and "ray" not in sys.modules
gate = AdmissionSettings(groups_per_step=2, group_size=2, max_staleness=2, pipeline_depth=1, max_in_flight=9)
run_server(ReplayConfig(address=sys.argv[1]), gate, "run", "d", 0)
print("left in order")
"""


@pytest.mark.slow
def test_the_server_process_is_small_and_leaves_in_order_on_sigterm() -> None:
    config = replay_config(address=free_address())
    process = subprocess.Popen([sys.executable, "-c", SERVER, config.address], stdout=subprocess.PIPE, text=True)
    try:
        wait_for_server(config.address, config=config, run_digest="d", wait_s=30)
        with open(f"/proc/{process.pid}/status") as status:
            resident_kb = int(status.read().split("VmRSS:")[1].split()[0])
        assert resident_kb < 100 * 1024
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=40)
        assert process.returncode == 0
        assert "left in order" in output
    finally:
        process.kill()


def test_no_thread_is_left_behind(run) -> None:
    client = run.worker("short")
    asyncio.run(client.close())
    asyncio.run(client.close())
    assert not [thread for thread in threading.enumerate() if thread.name == "replay-short"]
