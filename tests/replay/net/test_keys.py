from __future__ import annotations

import os
import shutil
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from zmq.auth import create_certificates

from asyncrl.config import load_config
from asyncrl.errors import ConfigError, NoProgress, RefusedPeerError, WireError
from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.replay.client.connection import Connection
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.net import keyring
from asyncrl.replay.net.keyring import ROLES, key_pair, make_keys, public_key, with_keys
from asyncrl.replay.net.keys import check_address, is_loopback, secure_client
from asyncrl.types import NO_VERSION
from tests.replay.helpers import close_all, replay_config, running_server, settings
from tests.waiting import until

REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:score"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def copied(keys: str, to: Path, *secrets: str) -> str:
    """What a machine of the run gets: all that is public, and the secrets of its roles."""
    to.mkdir()
    for name in (*(f"{role}.key" for role in ROLES), *(f"{role}.key_secret" for role in secrets)):
        shutil.copy(Path(keys) / name, to / name)
    return str(to)


def spoken(line: zmq.Socket, verb: str, body: object, run: str = "", life: str = "x") -> Envelope:
    """The answer to a message written by hand."""
    line.send(wire.encode_envelope(Envelope(run=run, verb=verb, request=1, incarnation=life, body=body)))
    assert line.poll(30_000), "no answer"
    return wire.decode_envelope(line.recv_multipart()[0])


def test_a_key_of_another_run_is_refused_at_once_and_by_name(tmp_path: Path) -> None:
    config = replay_config()
    make_keys(tmp_path / "other")
    shutil.copy(Path(config.keys) / "server.key", tmp_path / "other")  # Knows the server, is not known to it.
    with running_server(config, settings()):
        stranger = replace(config, keys=str(tmp_path / "other"))
        client = LearnerClient(config.address, rank=0, run_digest="d", config=stranger)
        with pytest.raises(RefusedPeerError, match=rf"refused the learner's key in {tmp_path}/other.*replay\.keys"):
            client.members()
        client.close()


def test_a_server_of_another_run_is_named_when_nobody_answers(tmp_path: Path) -> None:
    make_keys(tmp_path / "own")
    config = replay_config()
    with running_server(config, settings()):
        lost = replace(config, keys=str(tmp_path / "own"), wait_timeout_s=0.5)
        client = RolloutClient(config.address, worker="w", run_digest="d", config=lost)

        def named() -> bool:
            with pytest.raises(NoProgress) as silent:
                client.rendezvous().watch(-1, 0.0)
            return "it belongs to another run" in str(silent.value)

        until(named)  # a word of several handshakes: a busy machine may not come to them in one patience
        close_all([client])


def test_a_workers_key_can_be_no_learner_and_has_none_of_its_verbs(tmp_path: Path) -> None:
    config = replay_config()
    own = replace(config, keys=copied(config.keys, tmp_path / "worker", "worker"))
    with running_server(config, settings()):
        learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
        assert learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_step == 0
        with pytest.raises(ConfigError, match=r"learner\.key_secret"):
            LearnerClient(config.address, rank=0, run_digest="d", config=own)
        worker = RolloutClient(config.address, worker="w", run_digest="d", config=own)
        for verb, body in (("restore", [None, -1, None]), ("lease", [0, 0, 1, 0.0, 0]), ("members", None)):
            with pytest.raises(WireError, match="no verb"):
                worker._connection.request(verb, body).result(60)
        learner.publish(policy_version=0, parent=NO_VERSION)  # It is still the learner.
        close_all([worker, learner])


@pytest.mark.parametrize(
    ("own", "claimed"),
    [("worker", "learner"), ("learner", "worker")],
)
def test_the_role_that_a_peer_claims_must_be_that_of_its_key(own: str, claimed: str) -> None:
    config = replay_config()
    with running_server(config, settings()), zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        secure_client(line, config.keys, own)
        line.connect(config.address)
        refusal = spoken(line, "hello", [claimed, "rank 0", "d", NO_VERSION, ""])
        assert refusal.verb == "refused"
        assert f"says that it is a {claimed}" in refusal.body and f"its key is that of a {own}" in refusal.body


def test_a_workers_key_cannot_speak_for_a_learner_whose_incarnation_it_knows() -> None:
    config = replay_config()
    with running_server(config, settings()), zmq.Context() as context, context.socket(zmq.DEALER) as line:
        learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
        learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)
        line.setsockopt(zmq.LINGER, 0)
        secure_client(line, config.keys, "worker")
        line.connect(config.address)
        life = learner._connection.incarnation
        assert spoken(line, "finish", [0, None], run="run", life=life).verb == "refused"
        assert spoken(line, "goodbye", [0, None], run="run", life=life).verb == "refused"
        learner.publish(policy_version=0, parent=NO_VERSION)
        learner.close()


def test_no_refusal_tells_the_run_or_the_settings_of_the_server() -> None:
    config = replay_config()
    with (
        running_server(config, settings(), digest="secret digest"),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as line,
    ):
        line.setsockopt(zmq.LINGER, 0)
        secure_client(line, config.keys, "worker")
        line.connect(config.address)
        for verb, body, run in (
            ("hello", ["worker", "w", "mine", NO_VERSION, ""], ""),
            ("hello", ["learner", "w", "mine", NO_VERSION, ""], ""),
            ("hello", ["worker", "w", "secret digest", NO_VERSION, ""], "mine"),
            ("hello", ["worker"], ""),
            ("acquire", [0, [1, 0.0]], ""),
        ):
            reply = spoken(line, verb, body, run)
            assert reply.verb in ("refused", "wire", "unknown_peer")
            assert reply.run == "" and reply.incarnation == ""
            told = str(reply.body).replace("secret digest", "", 1) if "secret digest" in body else str(reply.body)
            assert "secret digest" not in told and "'run'" not in told


def test_each_role_has_a_pair_readable_by_its_owner_only_and_none_is_overwritten(tmp_path: Path) -> None:
    os.umask(before := os.umask(0))
    made = tmp_path / "deep" / "keys"
    make_keys(made)
    assert mode(made) == 0o700
    assert sorted(path.name for path in made.iterdir()) == sorted(
        f"{role}.{kind}" for role in ROLES for kind in ("key", "key_secret")
    )
    assert {mode(path) for path in made.iterdir()} == {0o600}
    assert len({public_key(str(made), role) for role in ROLES}) == len(ROLES)
    with pytest.raises(ConfigError, match="already exists"):
        make_keys(made)
    assert list(made.parent.iterdir()) == [made]
    assert os.umask(before) == before


def test_keys_made_by_several_threads_are_readable_by_their_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask is the process's: whatever another thread sets it to meanwhile, the files are of mode 0600."""

    def interrupted(*given: str) -> tuple[str, str]:
        os.umask(0o022)
        return create_certificates(*given)

    monkeypatch.setattr(keyring, "create_certificates", interrupted)
    before = os.umask(0o077)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(make_keys, [tmp_path / str(number) for number in range(8)]))
    finally:
        os.umask(before)
    assert {mode(path) for path in tmp_path.glob("*/*")} == {0o600}


def test_without_a_setting_the_keys_are_in_the_run_folder_and_made_once(tmp_path: Path) -> None:
    config = load_config([*REQUIRED, f"run.dir={tmp_path}/run"])
    found = with_keys(config).replay.keys
    assert Path(found) == tmp_path / "run" / "keys" and mode(Path(found)) == 0o700
    before = {path.name: path.read_bytes() for path in Path(found).iterdir()}
    assert with_keys(config).replay.keys == found
    assert {path.name: path.read_bytes() for path in Path(found).iterdir()} == before
    given = load_config([*REQUIRED, f"run.dir={tmp_path}/other", f"replay.keys={found}"])
    assert with_keys(given).replay.keys == found and not (tmp_path / "other").exists()


def test_keys_in_a_run_folder_that_another_user_could_have_made_are_refused(tmp_path: Path) -> None:
    config = load_config([*REQUIRED, f"run.dir={tmp_path}"])
    make_keys(tmp_path / "keys")
    (tmp_path / "keys").chmod(0o755)
    with pytest.raises(ConfigError, match=r"mode 0755.*mode 0700 and belong to you"):
        with_keys(config)


def test_a_secret_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "worker.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"worker\.key_secret has mode 0644.*chmod 600"):
        key_pair(str(tmp_path / "keys"), "worker")


def test_missing_keys_are_named(tmp_path: Path) -> None:
    config = replay_config(keys=str(tmp_path))
    with pytest.raises(ConfigError, match=r"learner\.key_secret cannot be read.*asyncrl keys DIR"):
        LearnerClient(config.address, rank=0, run_digest="d", config=config)
    with pytest.raises(ConfigError, match=r"replay\.keys is empty"):
        Connection(config.address, role="worker", name="w", run_digest="d", config=replay_config(keys=""))


def test_only_addresses_of_this_machine_count_as_loopback() -> None:
    assert all(map(is_loopback, ("tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://127.8.0.1:2", "tcp://[::1]:5")))
    assert not any(map(is_loopback, ("tcp://10.0.0.5:1", "tcp://replay.example:1", "ipc:///tmp/x", "tcp://*:1", "")))


def test_an_address_off_loopback_is_fine_with_keys_only() -> None:
    check_address("tcp://10.0.0.5:5577", keys="dir")
    check_address("ipc:///tmp/replay", keys="")
    with pytest.raises(ConfigError, match="asyncrl keys"):
        check_address("tcp://10.0.0.5:5577", keys="")
    for everywhere in ("*", "0", "0.0.0.0", "[::]", "[0:0:0:0:0:0:0:0]"):
        with pytest.raises(ConfigError, match="wildcard"):
            check_address(f"tcp://{everywhere}:5577", keys="dir")
    with pytest.raises(ConfigError, match="asyncrl keys"):
        check_address("tcp://127.no-such-name.invalid:5577", keys="")


def test_an_address_of_ipv6_is_listened_on_and_reached() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no ::1")
    config = replay_config()
    config = replace(config, address=config.address.replace("127.0.0.1", "[::1]"))
    assert is_loopback(config.address)
    with running_server(config, settings()):
        learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
        assert learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_step == 0
        learner.close()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
