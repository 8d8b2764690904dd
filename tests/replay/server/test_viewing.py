"""Viewers: what they see, and that their key allows them to change, take or delay nothing."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from asyncrl.errors import ConfigError, FencedError, WireError
from asyncrl.replay.client import connection
from asyncrl.replay.client.client import Viewer
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.reply import decode_replies
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.net.keyring import make_keys
from asyncrl.replay.net.keys import secure_client
from asyncrl.replay.protocol import View
from asyncrl.replay.server import shutdown, viewing
from asyncrl.replay.server.doorkeeper import MAX_MALFORMED, STRANGER_BYTES
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import Answer, Later, Session
from asyncrl.replay.server.viewing import MAX_VIEWERS, MOST_PEERS, VIEW_S, Viewing
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION
from tests.replay.helpers import Clock, group, replay_config, running_server, settings
from tests.replay.net.test_keys import copied, spoken
from tests.replay.served import Run, ready
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def _views_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewing, "VIEW_S", 0.05)


@contextlib.contextmanager
def watching(config: ReplayConfig) -> Iterator[Viewer]:
    with contextlib.closing(Viewer(config)) as viewer:
        yield viewer


def seen(viewer: Viewer) -> View:
    view = viewer.view(60.0)
    assert view is not None
    return view


@contextlib.contextmanager
def line(config: ReplayConfig, *, role: str = "viewer", server: str = "server") -> Iterator[zmq.Socket]:
    """With the viewer's key, written by hand."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        secure_client(socket, config.keys, role, server)
        socket.connect(config.address)
        yield socket


def hello(name: str = "eve", role: str = "viewer") -> list[object]:
    return [role, name, "", NO_VERSION, ""]


@pytest.mark.usefixtures("_views_come_often")
def test_a_viewer_sees_groups_versions_and_who_is_there_and_needs_the_public_key_of_the_server_alone(
    run: Run, tmp_path: Path
) -> None:
    version = run.start()
    worker = run.worker()

    async def work() -> None:
        orders = await ready(worker)
        for order in orders[:2]:
            await worker.insert(group(order, [version] * 3))

    asyncio.run(work())
    keys = tmp_path / "few"
    keys.mkdir()
    for name in ("server.key", "viewer.key", "viewer.key_secret"):
        shutil.copy(Path(run.config.keys) / name, keys / name)
    with watching(replace(run.config, keys=str(keys))) as viewer:
        view = seen(viewer)
        assert view.run == "run" and (view.trained_steps, view.policy_version, view.finished) == (0, 0, False)
        assert view.now["replay/inserted"] == 2 and view.now["replay/inserted_age_0"] == 2 and not view.last
        there = {(peer.role, peer.name): peer for peer in view.peers}
        assert there.keys() == {("learner", "rank 0"), ("worker", "w")}
        assert there["worker", "w"].served == 0 and there["worker", "w"].held == view.now["replay/in_flight"] > 0
        run.learner.lease(step=0, rank=0, world=1, wait_s=30)
        row = run.learner.trained(step=0, policy_version=1).metrics
        until(lambda: (view := seen(viewer)).trained_steps == 1 and view.last.items() <= row.items())
        run.learner.commit(step=0)
        until(lambda: seen(viewer).committed_steps == 1)


@pytest.mark.usefixtures("_views_come_often")
def test_it_sees_whom_the_learner_waits_for(run: Run) -> None:
    run.start()
    with watching(run.config) as viewer:
        assert seen(viewer).waits == ""
        run.learner._connection.request("lease", [0, 0, 1, 1.0, 0])
        until(lambda: "step 0 needs 2 groups; 0 are inserted" in seen(viewer).waits)


def test_with_the_viewers_key_no_verb_but_one_is_there(run: Run) -> None:
    """Hostile: it asks for everything that anybody may."""
    version = run.start()
    worker = run.worker()
    known = Handlers(ReplayCore(settings(), Clock()))
    verbs = {verb for groups in known.verbs_of.values() for each in groups for verb in each} | {"collect", "shards"}
    assert len(verbs) > 18 and "view" not in verbs
    with line(run.config) as eve:
        assert spoken(eve, "hello", hello(), life="e").verb == "ok"
        for verb in sorted(verbs):
            said = spoken(eve, verb, [0, [0, 0, 1, 0.0, 4]], run="run", life="e")
            assert said.verb == "wire" and "no verb" in said.body, verb
        assert spoken(eve, "view", [0, None], run="run", life="e").verb == "ok"
        for stranger in (worker, run.learner):  # for peers whose incarnation it got to know
            life = stranger._connection.incarnation
            assert spoken(eve, "goodbye", [0, None], run="run", life=life).verb == "refused"
        with line(run.config) as mallory:
            life = run.learner._connection.incarnation
            assert spoken(mallory, "hello", hello(), life=life).verb == "fenced"

    async def work() -> None:
        for order in await ready(worker):
            assert (await worker.insert(group(order, [version]))).status == "accepted"

    asyncio.run(work())
    assert len(run.learner.lease(step=0, rank=0, world=1, wait_s=30).plan.groups) == 2


def test_what_a_viewer_says_of_its_machine_raises_no_alarm(run: Run) -> None:
    run.start()
    with line(run.config) as eve:
        assert spoken(eve, "hello", hello(), life="e").verb == "ok"
        told = [0, [{"memory_free": -1.0, "clock_skew_s": 1e9}, []]]
        assert spoken(eve, "heartbeat", told, run="run", life="e").verb == "ok"
        worker = run.worker()

        async def work() -> None:
            for order in await ready(worker):
                await worker.insert(group(order, [0]))

        asyncio.run(work())
        run.learner.lease(step=0, rank=0, world=1, wait_s=30)
        row = run.learner.trained(step=0, policy_version=1).metrics
    assert row["machine/memory_free"] >= 0 and row.get("machine/clock_skew_s", 0.0) < 1e9


def test_large_messages_and_payloads_of_a_viewer_are_refused_and_end_its_connection(run: Run) -> None:
    run.start()
    with line(run.config) as eve:
        assert spoken(eve, "hello", hello(), life="e").verb == "ok"
        said = spoken(eve, "view", [0, "x" * STRANGER_BYTES], run="run", life="e")
        assert said.verb == "unknown_peer"
        for number in range(2, MAX_MALFORMED + 3):
            envelope = Envelope(run="run", verb="view", request=number, incarnation="e", body=[0, None])
            eve.send_multipart([wire.encode_envelope(envelope), b"x" * 1000])
        eve.send(wire.encode_envelope(replace(envelope, request=MAX_MALFORMED + 3)))
        while eve.poll(1_000):  # closed, or all of it refused
            for said, _ in decode_replies(eve.recv_multipart()):
                assert said.verb != "ok", "it is heard after all of this"
    run.worker()
    asyncio.run(ready(run.worker("another")))


@pytest.mark.usefixtures("_views_come_often")
def test_the_server_of_a_finished_run_waits_for_no_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "GRACE_S", 0.1)
    monkeypatch.setattr(connection, "GOODBYE_S", 0.1)  # said by the viewer to nobody
    config = replay_config()
    with running_server(config, settings()) as thread, watching(config) as viewer:
        run = Run(config)
        run.start()
        seen(viewer)
        run.learner.finish()
        run.close()
        thread.join(60)
        assert not thread.is_alive()


def test_that_a_run_is_finished_is_told_at_once_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next view is due its server may be stopped, and the viewer would wait a minute for it."""
    monkeypatch.setattr(viewing, "VIEW_S", 3600.0)
    config = replay_config()
    with running_server(config, settings()), watching(config) as viewer, contextlib.closing(Run(config)) as run:
        run.start()
        assert not seen(viewer).finished
        assert viewer.view(0.5) is None
        run.learner.finish()
        assert seen(viewer).finished
        assert viewer.view(0.5) is None


def test_only_so_many_may_watch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.replay.server.loop.MAX_VIEWERS", 2)
    config = replay_config()
    with running_server(config, settings()), watching(config) as one, watching(config) as two:
        assert seen(one).peers == seen(two).peers == ()
        with watching(config) as three, pytest.raises(FencedError, match="2 already watch"):
            three.view(60.0)
        two.close()

        def let_in() -> bool:
            with contextlib.suppress(FencedError), watching(config) as four:
                return bool(seen(four))
            return False

        until(let_in)  # the server hears of who has left by itself
    assert MAX_VIEWERS == 16


def test_keys_of_an_earlier_version_have_no_viewer_and_serve_all_others(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    for name in ("viewer.key", "viewer.key_secret"):
        (tmp_path / "keys" / name).unlink()
    config = replay_config(keys=str(tmp_path / "keys"))
    with running_server(config, settings()), contextlib.closing(Run(config)) as run:
        run.start()
        with pytest.raises(ConfigError, match="made by an earlier version of asyncrl has no viewer"):
            Viewer(config)
        asyncio.run(ready(run.worker()))


def test_a_machine_without_the_viewers_secret_cannot_watch(tmp_path: Path) -> None:
    config = replay_config()
    with pytest.raises(ConfigError, match=r"viewer\.key_secret"):
        Viewer(replace(config, keys=copied(config.keys, tmp_path / "worker", "worker")))


def viewing_at(clock: Clock, sessions: list[Session]) -> Viewing:
    return Viewing("run", ReplayCore(settings(), clock), sessions)


def session(name: str, role: str = "viewer", seen: float = 0.0) -> Session:
    return Session(role, name, f"life of {name}", b"", seen)


def test_however_many_ask_and_however_often_it_is_made_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, eve, bob = Clock(), session("eve"), session("bob")
    shown = viewing_at(clock, [eve, bob])
    made = list[float]()
    monkeypatch.setattr(shown, "made", lambda now, known=shown.made: made.append(now) or known(now))
    assert isinstance(shown.view(eve, None, ()), Answer) and isinstance(shown.view(bob, None, ()), Answer)
    later = shown.view(eve, None, ())
    assert isinstance(later, Later) and later.wait_s == VIEW_S and later.retry() is None and not later.there()
    eve.waiting.add(7)
    for body, frames in ((None, ()), ([1], ()), (None, (b"x",))):
        with pytest.raises(WireError):
            shown.view(eve, body, frames)
    assert made == [0.0]
    clock.now = VIEW_S
    assert isinstance(later.at_deadline(), Answer) and made == [0.0, VIEW_S]


def test_of_many_peers_the_most_silent_are_told_and_no_viewer() -> None:
    clock = Clock()
    clock.now = 1000.0
    many = [session(f"w{number}", "worker", seen=float(number)) for number in range(MOST_PEERS + 5)]
    view = viewing_at(clock, [session("eve"), *reversed(many)]).made(clock.now)
    assert [peer.name for peer in view.peers] == [f"w{number}" for number in range(MOST_PEERS)]
    assert view.more_peers == 5 and view.peers[1].silent_s == 999.0 and viewing.VIEW_S == VIEW_S
