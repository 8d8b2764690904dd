from __future__ import annotations

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.weights.factory import make_publisher, make_subscriber
from tests.waiting import until
from tests.weights.board import Board, WorkerRendezvous

CPU = torch.device("cpu")


@pytest.mark.parametrize(("transport", "backend"), [("broadcast", "auto"), ("broadcast", "ipc"), ("files", "auto")])
def test_both_ends_of_a_transport_meet_through_the_config(tmp_path, transport, backend):
    config, board, loaded = Config(), Board(), []
    config.weights.transport, config.weights.backend = transport, backend
    config.weights.timeout_s = 60.0
    board.join("w", "1")
    publisher = make_publisher(config, board, tmp_path, 0, CPU)
    subscriber = make_subscriber(
        config, WorkerRendezvous(board, "w"), "w", "1", lambda version, tensors: loaded.append((version, dict(tensors)))
    )
    stats = publisher.publish(3, [("a", torch.arange(5.0))])
    assert stats.nbytes >= 20
    until(lambda: subscriber.policy_version == 3, within_s=100, holds=lambda: subscriber.check() is None)
    assert loaded[0][0] == 3
    assert torch.equal(loaded[0][1]["a"], torch.arange(5.0))
    publisher.close()
    subscriber.close()


def test_other_ranks_only_gather(tmp_path):
    publisher = make_publisher(Config(), Board(), tmp_path, 1, CPU)
    assert publisher.publish(0, [("a", torch.zeros(4))]).wait_previous_s == 0
    publisher.wait()
    assert publisher.stats().keys() == {"weights/gather_s", "weights/wait_s"}
    publisher.close()


@pytest.mark.parametrize("key", ["transport", "wire_dtype"])
def test_unknown_names_are_refused(tmp_path, key):
    config = Config()
    setattr(config.weights, key, "pigeon")
    with pytest.raises(ConfigError, match="pigeon"):
        make_publisher(config, Board(), tmp_path, 0, CPU)
