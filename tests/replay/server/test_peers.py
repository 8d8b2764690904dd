"""Peers that die, are replaced, are cut off, come late, or are hostile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from asyncrl.errors import FencedError, NoProgress, OtherSchemaError, RefusedPeerError, ReplayError, WireError
from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.net.keys import secure_client
from asyncrl.replay.server import shutdown
from asyncrl.types import NO_VERSION
from tests.addresses import free_address
from tests.replay.helpers import SOON_SILENT_S, group, replay_config, running_server, settings
from tests.replay.served import Proxy, Run, ready
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)


@pytest.mark.slow
def test_silent_peers_are_named_by_the_others(caplog) -> None:
    """As a stopped process is: its thread neither speaks nor says goodbye."""
    config = replay_config(heartbeat_timeout_s=SOON_SILENT_S)
    with running_server(config, settings()):
        run = Run(config)
        run.start()
        worker, watcher = run.worker("mute"), run.worker("watcher")
        asyncio.run(ready(worker))
        watcher.rendezvous().served(0, "f")
        for client in (worker, run.learner):
            client._connection._closing.set()
        wanted = ("worker mute was silent for", "learner rank 0 was silent for")
        until(lambda: all(text in caplog.text for text in wanted))
    until(lambda: "no word from the replay server" in caplog.text)
    asyncio.run(watcher.close())


def test_a_server_whose_name_has_no_address_is_told_as_that() -> None:
    config = replay_config(address="tcp://no-such-host.invalid:5577", heartbeat_timeout_s=0.5, wait_timeout_s=2.0)
    learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
    try:
        with pytest.raises(NoProgress, match=r"this machine knows no address of no-such-host\.invalid"):
            learner.restore(step=None, policy_version=0, snapshot=None)
    finally:
        learner.close()


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

    async def work(run: Run) -> None:
        dying, other = run.worker("dying"), run.worker("other")
        (order,) = await ready(dying, 1)
        dying._connection._closing.set()  # Stops its thread without a goodbye, as a kill would.
        other.rendezvous().served(0, "f")
        taken = []
        while order.group_id not in taken:
            taken += [o.group_id for o in (await other.acquire(slots=8, wait_s=0.5)).assignments]

    with running_server(config, settings()), contextlib.closing(Run(config)) as run:
        run.start()
        asyncio.run(asyncio.wait_for(work(run), 60))


def test_requests_outlive_connections_that_drop() -> None:
    """Whatever was on the way is lost, requests and replies; everything is asked again and runs once."""
    server_config = replay_config()
    proxy = Proxy(server_config.address)
    with running_server(server_config, settings(groups_per_step=8, pipeline_depth=2)):
        run = Run(replay_config(address=proxy.address))
        run.start()
        client = run.worker()

        async def work() -> None:
            client.rendezvous().served(0, "f")
            while not (acquired := await client.acquire(slots=8, wait_s=0.3)).stop:
                made = [group(order, [order.policy_version] * 3) for order in acquired.assignments]
                replies = await asyncio.gather(*(client.insert(one) for one in made))
                assert {reply.status for reply in replies} <= {"accepted", "duplicate"}
                newest = client.rendezvous().watch(-1, 0).values.get("version", 0)
                client.rendezvous().served(newest, "f")

        seen: list[int] = []
        step = 0
        with ThreadPoolExecutor() as pool:
            try:
                working = pool.submit(asyncio.run, work())
                pool.submit(proxy.keep_dropping)
                while proxy.dropped < 6 or step < 2:
                    plan = run.learner.lease(step=step, rank=0, world=1, wait_s=60).plan
                    seen += [header.group_id for header in plan.groups]
                    metrics = run.learner.trained(step=step, policy_version=step + 1).metrics
                    run.learner.announce({"version": step + 1})
                    run.learner.commit(step=step)
                    step += 1
                run.learner.finish()
                working.result(60)
            finally:
                run.close()
                proxy.close()
        assert len(seen) == len(set(seen)) == 8 * step
        assert metrics["replay/trained"] == 8 * step
        assert not [name for name in metrics if name.startswith("replay/dropped")]


def test_a_server_that_comes_late_is_waited_for() -> None:
    config = replay_config()
    learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
    time.sleep(0.3)
    with running_server(config, settings()):
        assert learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_step == 0
        learner.close()


def test_a_server_that_never_comes_is_named_in_the_error() -> None:
    config = replay_config(wait_timeout_s=0.4)
    learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
    with pytest.raises(NoProgress, match=config.address):
        learner.members()
    learner.close()


def test_a_worker_of_a_restarted_server_is_told_to_start_anew() -> None:
    config = replay_config()
    client = RolloutClient(config.address, worker="w", run_digest="d", config=config)
    with running_server(config, settings()):
        client.rendezvous().watch(-1, 0)
    with running_server(config, settings()):
        with pytest.raises(FencedError, match="restarted"):
            asyncio.run(client.acquire(slots=1, wait_s=30))
        asyncio.run(client.close())


def test_a_peer_of_another_version_of_asyncrl_is_told_and_need_not_try_again(run, monkeypatch) -> None:
    real = wire.decode_envelope

    def other(frame, *, max_bytes=wire.MAX_REQUEST_BYTES):
        if max_bytes == wire.MAX_REPLY_BYTES:
            raise OtherSchemaError("the peer uses wire schema 15, and this process uses 14")
        return real(frame, max_bytes=max_bytes)

    monkeypatch.setattr(wire, "decode_envelope", other)
    learner = LearnerClient(run.config.address, rank=0, run_digest="d", config=run.config)
    with pytest.raises(RefusedPeerError, match=f"{run.config.address}: the peer uses wire schema 15"):
        learner.members()
    learner.close()


def test_a_peer_with_other_settings_is_refused_and_not_told_those_of_the_server(run, caplog) -> None:
    stranger = LearnerClient(run.config.address, rank=0, run_digest="other", config=run.config)
    with pytest.raises(RefusedPeerError, match="digest is other; that of the server") as refused:
        stranger.members()
    assert "'run'" not in str(refused.value)
    assert "digest other, run ''; here they are d, 'run'" in caplog.text
    stranger.close()
    with pytest.raises(ReplayError):
        stranger.members()


def test_a_learner_that_was_replaced_is_fenced(run, caplog) -> None:
    run.start()
    second = run.new_learner()
    with pytest.raises(ReplayError, match="no running learner"):
        second.commit(step=0)
    second.restore(step=None, policy_version=NO_VERSION, snapshot=None)
    with pytest.raises(FencedError, match="started by mistake, stop it"):
        run.learner.publish(policy_version=5, parent=0)
    assert "learner rank 0 connected, and another was heard" in caplog.text
    assert caplog.text.count("If both run, stop one of them") == 1


def test_a_learner_of_another_folder_leaves_the_one_that_is_heard_of_its_run_before_any_checkpoint(run) -> None:
    first = {"step": None, "policy_version": NO_VERSION, "snapshot": None}
    run.learner.restore(**first, run="mine")
    run.learner.publish(policy_version=0, parent=NO_VERSION)

    with pytest.raises(FencedError, match="a learner of another run folder trains here"):
        run.new_learner().restore(**first, run="another")
    run.learner.publish(policy_version=1, parent=0)
    again = run.new_learner()  # of the same folder: it was started again, and the first is known to be gone
    again.restore(**first, run="mine")
    with pytest.raises(FencedError):
        run.learner.publish(policy_version=2, parent=0)
    again.close()
    run.new_learner().restore(**first, run="another")  # which trains here no more


def test_a_second_learner_that_cannot_restore_leaves_the_first_its_run(run) -> None:
    version = run.start()
    worker = run.worker()

    async def work() -> None:
        for order in await ready(worker):
            await worker.insert(group(order, [version]))

    asyncio.run(work())
    run.learner.lease(step=0, rank=0, world=1, wait_s=30)
    run.learner.trained(step=0, policy_version=version + 1)
    run.learner.commit(step=0)
    second = run.new_learner()
    with pytest.raises(ReplayError, match="begins at step 0"):
        second.restore(step=None, policy_version=NO_VERSION, snapshot=None)
    run.learner.lease(step=1, rank=0, world=1, wait_s=30)
    run.learner.trained(step=1, policy_version=version + 2)


def hostile_frames(rng: random.Random):
    """Mutations of good messages, and plain noise."""
    good = [
        [wire.encode_envelope(Envelope(run="run", verb=verb, request=1, incarnation="evil", body=body)), b"x" * 40]
        for verb, body in (
            ("hello", ["worker", "evil", "d", -1, ""]),
            ("insert", [0, [[0, 0, 0, "w", 80, [[5, 2, 0.0, [0, 3]]]], [[40, 0]], None]]),
            ("acquire", [0, [1, 0.0]]),
            ("lease", [0, [0, 0, 1, 0.0, 0]]),
            ("heartbeat", [0, [{}, []]]),
            ("restore", [0, [None, -1, {"schema": 1}]]),
            ("served", [0, [1 << 40, "f"]]),
            ("fail", [0, [[0, 0, 0, 0, 0], "no reason", "", [], None]]),
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
    secure_client(evil, run.config.keys, "worker")
    evil.connect(run.config.address)
    frames = hostile_frames(random.Random(1))

    def complaints() -> list[str]:
        return [record.getMessage() for record in caplog.records if "malformed" in record.getMessage()]

    def send() -> bool:
        for _ in range(3000):
            evil.send_multipart(next(frames))
            while evil.poll(0):
                evil.recv_multipart()
        return len(complaints()) > 64

    try:
        until(send)
    finally:
        evil.close()
        context.term()

    async def work() -> None:
        for order in await ready(client):
            assert (await client.insert(group(order, [version]))).status == "accepted"

    asyncio.run(work())
    assert len(run.learner.lease(step=0, rank=0, world=1, wait_s=30).plan.groups) == 2
    assert any("'evil'" in complaint for complaint in complaints())


def test_a_worker_has_no_learner_verbs(run) -> None:
    client = run.worker()
    with pytest.raises(WireError, match="no verb"):
        client._connection.request("finish").result(timeout=40)


def test_the_server_leaves_when_the_run_is_finished_and_everybody_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "GRACE_S", 0.1)
    config = replay_config()
    with running_server(config, settings()) as thread:
        run = Run(config)
        run.start()
        client = run.worker()
        client.rendezvous().served(0, "f")
        run.learner.finish()
        assert asyncio.run(client.acquire(slots=1, wait_s=30)).stop
        assert thread.is_alive()
        run.close()
        thread.join(40)
        assert not thread.is_alive()


SERVER = """
import sys, threading
from asyncrl.settings.replay import ReplayConfig
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.serving import run_server
assert "torch" not in sys.modules and "ray" not in sys.modules
gate = AdmissionSettings(groups_per_step=2, group_size=2, max_staleness=2, pipeline_depth=1, max_in_flight=9)
run_server(ReplayConfig(address=sys.argv[1], keys=sys.argv[2]), gate, "run", "d", 0)
print("left in order")
"""


@pytest.mark.slow
def test_the_server_process_is_small_and_leaves_in_order_on_sigterm() -> None:
    config = replay_config(address=free_address())
    command = [sys.executable, "-c", SERVER, config.address, config.keys]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        probe = LearnerClient(config.address, rank=0, run_digest="d", config=config)
        probe.members()
        probe.close()
        with open(f"/proc/{process.pid}/status") as status:
            resident_kb = int(status.read().split("VmRSS:")[1].split()[0])
        assert resident_kb < 100 * 1024
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "left in order" in output
    finally:
        process.kill()


def test_no_thread_is_left_behind(run) -> None:
    client = run.worker("short")
    asyncio.run(client.close())
    asyncio.run(client.close())
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "replay-short"])
