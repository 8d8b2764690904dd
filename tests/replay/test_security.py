from __future__ import annotations

import shutil
import stat

import pytest

from asyncrl.errors import ConfigError, NoProgress
from asyncrl.replay.client import LearnerClient
from asyncrl.replay.security import check_address, is_loopback, make_keys
from asyncrl.types import NO_VERSION

from .helpers import replay_config, running_server, settings


def test_only_keys_on_the_allow_list_get_an_answer(tmp_path) -> None:
    keys, stranger = tmp_path / "keys", tmp_path / "stranger"
    make_keys(keys)
    make_keys(stranger)
    shutil.copy(keys / "server.key", stranger / "server.key")  # Knows the server, is not known to it.
    config = replay_config(keys=str(keys))
    with running_server(config, settings()):
        learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
        assert learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_step == 0
        learner.close()
        for other in (str(stranger), ""):
            refused = replay_config(address=config.address, keys=other, wait_timeout_s=0.5)
            client = LearnerClient(config.address, rank=0, run_digest="d", config=refused)
            with pytest.raises(NoProgress):
                client.members()
            client.close()


def test_secrets_are_readable_by_their_owner_only_and_never_overwritten(tmp_path) -> None:
    make_keys(tmp_path, clients=("a", "b"))
    for name in ("server", "a", "b"):
        assert stat.S_IMODE((tmp_path / f"{name}.key_secret").stat().st_mode) == 0o600
    assert sorted(path.name for path in (tmp_path / "clients").iterdir()) == ["a.key", "b.key"]
    with pytest.raises(ConfigError, match="already"):
        make_keys(tmp_path)


def test_missing_keys_are_named(tmp_path) -> None:
    config = replay_config(keys=str(tmp_path))
    with pytest.raises(ConfigError, match=r"client\.key_secret"):
        LearnerClient(config.address, rank=0, run_digest="d", config=config)


def test_only_addresses_of_this_machine_count_as_loopback() -> None:
    assert all(map(is_loopback, ("tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://127.8.0.1:2", "tcp://[::1]:5")))
    assert not any(map(is_loopback, ("tcp://10.0.0.5:1", "tcp://replay.example:1", "ipc:///tmp/x", "tcp://*:1", "")))


def test_an_address_off_loopback_is_fine_with_keys_only() -> None:
    check_address("tcp://10.0.0.5:5577", keys="dir")
    check_address("ipc:///tmp/replay", keys="")
    with pytest.raises(ConfigError, match="asyncrl keys"):
        check_address("tcp://10.0.0.5:5577", keys="")
    with pytest.raises(ConfigError, match="wildcard"):
        check_address("tcp://*:5577", keys="dir")
