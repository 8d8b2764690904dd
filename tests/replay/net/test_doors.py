"""The unix-domain sockets beside tcp: who comes by them, and that they prove what a key does; see `test_keys`."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from asyncrl.errors import ConfigError, ReplayError
from asyncrl.replay.client import connection
from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.replay.client.connection import Connection
from asyncrl.replay.net.doors import DOORS_DIR, Doors, open_door
from asyncrl.replay.net.keyring import ROLES, make_keys
from asyncrl.replay.net.keys import Guests
from asyncrl.replay.server.router import Entrance, entrance
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION
from tests.replay.helpers import SOON_SILENT_S, replay_config, running_server, settings
from tests.replay.net.test_keys import copied, spoken
from tests.waiting import until


@pytest.fixture
def config(tmp_path: Path) -> ReplayConfig:
    make_keys(tmp_path / "keys")
    return replay_config(keys=str(tmp_path / "keys"))


@contextmanager
def line(config: ReplayConfig, role: str) -> Iterator[zmq.Socket]:
    """Through the door of `role`, written by hand."""
    until(lambda: has_door(config, role))
    doors = Doors(config.keys, config.address)
    with closing(doors), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{doors.path(role)}")
        yield socket


def has_door(config: ReplayConfig, role: str) -> bool:
    doors = open_door(config.keys, config.address, role)
    with closing(doors) if doors else nullcontext():
        return doors is not None


@contextmanager
def learner(config: ReplayConfig) -> Iterator[LearnerClient]:
    with closing(LearnerClient(config.address, rank=0, run_digest="d", config=config)) as client:
        yield client


def came_by_door(client: LearnerClient | RolloutClient) -> bool:
    return client._connection._door is not None


def test_whoever_is_there_before_the_server_too_comes_by_a_door_and_none_is_left_behind(
    config: ReplayConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GOODBYE_S", 0.1)  # said to nobody: the server ends first
    with learner(config) as early:
        assert not came_by_door(early)
        with running_server(config, settings()):
            assert early.members() == [] and came_by_door(early)
            with learner(config) as late:
                assert late.members() == [] and came_by_door(late)
            folder = Path(config.keys) / DOORS_DIR
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert {path.name.rpartition("-")[2] for path in folder.iterdir()} == {*ROLES} - {"server"}
    assert list(folder.iterdir()) == []


def test_without_the_setting_all_come_by_tcp(config: ReplayConfig) -> None:
    config = replace(config, local_sockets=False)
    with running_server(config, settings()), learner(config) as client:
        assert client.members() == [] and not came_by_door(client)
        assert not (Path(config.keys) / DOORS_DIR).exists()


def test_the_role_that_a_peer_claims_must_be_that_of_its_door(config: ReplayConfig) -> None:
    with running_server(config, settings()), line(config, "worker") as socket:
        refusal = spoken(socket, "hello", ["learner", "rank 0", "d", NO_VERSION, ""])
        assert refusal.verb == "refused" and "says that it is a learner" in refusal.body
        assert refusal.run == "" and refusal.incarnation == ""


def test_the_worker_s_door_cannot_speak_for_a_learner_whose_incarnation_it_knows(config: ReplayConfig) -> None:
    with running_server(config, settings()), learner(config) as client, line(config, "worker") as socket:
        client.restore(step=None, policy_version=NO_VERSION, snapshot=None)
        life = client._connection.incarnation
        assert spoken(socket, "finish", [0, None], run="run", life=life).verb == "refused"
        assert spoken(socket, "goodbye", [0, None], run="run", life=life).verb == "refused"
        client.publish(policy_version=0, parent=NO_VERSION)


def test_a_machine_without_the_secret_of_a_role_has_not_its_door(config: ReplayConfig, tmp_path: Path) -> None:
    own = replace(config, keys=copied(config.keys, tmp_path / "worker", "worker"))
    with running_server(config, settings()):
        (Path(own.keys) / DOORS_DIR).symlink_to(Path(config.keys) / DOORS_DIR)
        with pytest.raises(ConfigError, match=r"learner\.key_secret"):
            LearnerClient(config.address, rank=0, run_digest="d", config=own)
        with closing(Connection(config.address, role="worker", name="w", run_digest="d", config=own)) as worker:
            worker.request("watch", [-1, 0.0]).result(60)
            assert worker._door is None, "a link to another folder is none"


def test_a_folder_that_another_user_could_have_made_is_used_by_neither_end(
    config: ReplayConfig, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(config.keys) / DOORS_DIR
    folder.mkdir()
    folder.chmod(0o770)
    with running_server(config, settings()), learner(config) as client:
        assert client.members() == [] and not came_by_door(client)
    assert "has mode 0770" in caplog.text and "all connections use TCP" in caplog.text
    with running_server(replace(config, local_sockets=False), settings()):
        listener = socket.socket(socket.AF_UNIX)
        folder.chmod(0o700)
        with closing(Doors(config.keys, config.address)) as doors, listener:
            listener.bind(doors.path("learner"))
            listener.listen()
            assert doors.is_open("learner")
            folder.chmod(0o750)
            assert not has_door(config, "learner")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")
def test_another_user_cannot_open_a_door(config: ReplayConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with entrance(config):
        (door,) = (Path(config.keys) / DOORS_DIR).glob("*-worker")
        Path(config.keys).chmod(0o711)  # Else that folder alone would keep others out.
        monkeypatch.chdir(config.keys)
        with socket.socket(socket.AF_UNIX) as own, socket.socket(socket.AF_UNIX) as foreign:
            own.connect(f"{DOORS_DIR}/{door.name}")
            os.seteuid(65534)
            try:
                with pytest.raises(PermissionError):
                    foreign.connect(f"{DOORS_DIR}/{door.name}")
            finally:
                os.seteuid(0)


def test_what_a_killed_server_left_is_no_door_and_the_next_server_takes_its_place(config: ReplayConfig) -> None:
    with closing(Doors(config.keys, config.address, make=True)) as doors:
        for role in ("worker", "learner"):
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(doors.path(role))
        assert not has_door(config, "learner")
        with entrance(replace(config, local_sockets=False)):  # by tcp, where nobody took it away
            assert not has_door(config, "learner")
        with running_server(config, settings()), learner(config) as client:
            assert client.members() == [] and came_by_door(client)


def test_what_killed_servers_left_at_other_addresses_is_swept_away_and_nothing_else(config: ReplayConfig) -> None:
    folder = Path(config.keys) / DOORS_DIR
    folder.mkdir(mode=0o700)
    with (
        closing(Doors(config.keys, "tcp://127.0.0.1:1")) as killed,
        closing(Doors(config.keys, "tcp://other:2")) as live,
    ):
        fresh = killed.path("learner")
        elsewhere = f"{fresh.rpartition('/')[0]}/{'0' * 16}-{'1' * 16}-worker"  # another machine's
        old = [killed.path("worker"), live.path("worker"), elsewhere]
        with ExitStack() as stack:
            for path in (fresh, *old):
                door = stack.enter_context(socket.socket(socket.AF_UNIX))
                door.bind(path)
                if path == live.path("worker"):
                    door.listen()
                if path != fresh:
                    os.utime(path, (1, 1))
            with running_server(config, settings()):
                until(lambda: has_door(config, "worker"))
                assert [os.path.lexists(path) for path in (*old, fresh)] == [False, True, True, True]


def test_behind_a_door_that_is_silent_a_client_takes_tcp(config: ReplayConfig) -> None:
    config = replace(config, heartbeat_timeout_s=SOON_SILENT_S)
    with (
        running_server(replace(config, local_sockets=False), settings()),
        closing(Doors(config.keys, config.address, make=True)) as doors,
        socket.socket(socket.AF_UNIX) as hung,
    ):
        hung.bind(doors.path("learner"))
        hung.listen()
        with learner(config) as client:
            assert came_by_door(client)
            assert client.members() == [] and not came_by_door(client)


def test_where_one_door_cannot_be_there_is_none(config: ReplayConfig, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Doors(config.keys, config.address, make=True)) as doors:
        Path(doors.path("learner")).mkdir()  # as a file system that has no sockets
    with running_server(config, settings()), learner(config) as client:
        assert client.members() == [] and not came_by_door(client)
        assert not has_door(config, "worker")
    assert "all connections use TCP" in caplog.text


def test_a_second_server_at_the_address_leaves_the_doors_of_the_first(config: ReplayConfig) -> None:
    with running_server(config, settings()), learner(config) as client:
        client.members()
        with pytest.raises(ReplayError, match="cannot listen"), entrance(config):
            pass
        assert has_door(config, "worker")
        assert client.members() == []


def test_a_door_may_be_as_deep_as_folders_go(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120) / "keys"
    make_keys(deep)
    config = replay_config(keys=str(deep))
    with running_server(config, settings()), learner(config) as client:
        assert client.members() == [] and came_by_door(client)


def test_another_address_or_folder_of_keys_is_another_door(config: ReplayConfig, tmp_path: Path) -> None:
    with entrance(config):
        assert not has_door(replace(config, address=config.address + "0"), "worker")
        shutil.copytree(config.keys, tmp_path / "copy", ignore=shutil.ignore_patterns(DOORS_DIR))
        assert not has_door(replace(config, keys=str(tmp_path / "copy")), "worker")


def test_whoever_sends_without_end_by_one_socket_leaves_the_others_their_turns(config: ReplayConfig) -> None:
    """The server polls again after 8 MiB, which may be a single message."""
    with zmq.Context() as context, ExitStack() as stack:
        routers = [stack.enter_context(context.socket(zmq.ROUTER)) for _ in range(3)]
        for number, router in enumerate(routers):
            router.bind(f"inproc://{number}")
            sender = stack.enter_context(context.socket(zmq.DEALER))
            sender.connect(f"inproc://{number}")
            for _ in range(40 if number == 0 else 2):
                sender.send_multipart([b"message"])
        both = Entrance(routers[0], Guests(config.keys), {"learner": routers[1], "worker": routers[2]})
        both._roles[0] = lambda connection: "by tcp"
        heard = []
        for _ in range(6):
            assert both.heard(dict.fromkeys(routers, zmq.POLLIN))
            heard.append(both.receive()[2])
        assert heard == ["by tcp", "learner", "worker"] * 2
