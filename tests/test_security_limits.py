"""What SECURITY.md lists as not protected is really so; if that changes, the page must change."""

from __future__ import annotations

import os
import pickletools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import zmq
from torch.distributed.checkpoint import state_dict_saver

from asyncrl.checks.rewards import reward_terms
from asyncrl.replay.client.client import LearnerClient
from asyncrl.replay.codec import wire
from asyncrl.replay.net.keys import secure_client
from asyncrl.rewards.trial import try_reward
from asyncrl.schema import RewardConfig
from asyncrl.types import NO_VERSION
from asyncrl.weights.broadcast.group import connect_store, host_store
from tests.replay.helpers import replay_config, running_server, settings

REWARD = """
import os
def score(completion, row):
    secret = os.environ["ASYNCRL_TEST_SECRET"]
    return float(os.getuid() == row["user"] and secret == "s" and os.access(row["file"], os.W_OK))
"""


def test_reward_code_has_the_rights_and_the_environment_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.py").write_text(REWARD)
    monkeypatch.setenv("ASYNCRL_TEST_SECRET", "s")
    row = {"user": os.getuid(), "file": str(tmp_path)}
    terms = reward_terms(RewardConfig(function=f"{tmp_path}/r.py:score"))
    (_, first), *_ = try_reward(terms, [("row", row)], timeout_s=60)
    assert getattr(first, "value", first) == 1.0


def test_whoever_reaches_a_store_may_list_read_and_change_its_keys() -> None:
    store, port = host_store("127.0.0.1", 20.0)
    store.set("hello/w/life", b"invite me")
    anyone = connect_store("127.0.0.1", port, 20.0)
    assert "hello/w/life" in " ".join(anyone.list_keys())
    assert anyone.get("hello/w/life") == b"invite me"
    anyone.set("hello/w/life", b"no, me")
    assert store.get("hello/w/life") == b"no, me"


def test_a_message_without_an_end_is_kept_and_the_others_are_served_meanwhile() -> None:
    config = replay_config()
    with running_server(config, settings()), zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        secure_client(line, config.keys, "worker")
        line.connect(config.address)
        for _ in range(300):
            line.send(bytes(1 << 16), zmq.SNDMORE)
        learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
        assert learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_step == 0
        learner.close()
        assert not line.poll(300), "it was refused before its end"
        line.send(b"")
        assert line.poll(60_000) and wire.decode_envelope(line.recv_multipart()[0]).verb == "wire", "it was read then"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_metadata_of_a_checkpoint_of_torch_is_pickled(tmp_path: Path) -> None:
    state_dict_saver.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step_1", no_dist=not dist.is_initialized())
    names = {code.name for code, _, _ in pickletools.genops((tmp_path / "step_1" / ".metadata").read_bytes())}
    assert {"STACK_GLOBAL", "REDUCE"} & names, "it names what is to be called"
