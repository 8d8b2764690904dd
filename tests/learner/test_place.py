from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError
from asyncrl.learner.place import Place


def test_ranks_of_one_machine_are_not_put_on_one_gpu():
    with pytest.raises(ConfigError, match="puts all 2 ranks of a machine on one GPU"):
        Place.of({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "cuda:0")


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused_by_its_setting(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"learner.device={device}, but torch sees no GPU"):
        Place.of({}, device)
