"""What is sent to a worker on another machine and how it is used there; with Ray in `test_nodes.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import config_to_dict
from asyncrl.errors import ConfigError
from asyncrl.replay.net.keyring import key_pair, make_keys
from asyncrl.rollout.luggage import Luggage, code_of, local_paths, pack, travelling, unpacked
from asyncrl.rollout.pool.nodes import bury, lacking
from asyncrl.rollout.pool.specs import absolute_paths
from asyncrl.schema import Config
from asyncrl.storage.held import HELD, PREFIX


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def of_a_user(folder: Path) -> Config:
    write(folder / "code" / "reward.py", "import json\nfrom near import one\nimport package.inner\n")
    write(folder / "code" / "near.py", "import farther\none = 1\n")
    write(folder / "code" / "farther.py")
    write(folder / "code" / "package" / "__init__.py")
    write(folder / "code" / "package" / "inner.py")
    write(folder / "code" / "not_asked_for.py")
    config = Config()
    config.reward.function = str(folder / "code" / "reward.py") + ":score"
    config.data.path = str(write(folder / "rows.jsonl", "{}\n"))
    config.replay.keys = str(folder / "keys")
    make_keys(folder / "keys")
    return config


def packed(config: Config) -> tuple[Luggage, dict]:
    settings = absolute_paths(config_to_dict(config))
    return pack(config, settings, {}), settings


def test_a_file_travels_with_what_it_imports_from_beside_it_and_no_more(tmp_path):
    luggage, _ = packed(of_a_user(tmp_path))
    names = {str(Path(path).relative_to(tmp_path / "code")) for path in luggage.files}
    assert names == {"reward.py", "near.py", "farther.py", "package/__init__.py", "package/inner.py"}
    assert sorted(luggage.keys) == [
        "learner.key",
        "server.key",
        "worker.key",
        "worker.key_secret",
    ]


def test_code_that_does_not_parse_travels_alone(tmp_path):
    assert list(code_of(write(tmp_path / "broken.py", "import (")).values()) == [b"import ("]


def test_where_nothing_lies_the_code_runs_from_a_folder_that_ends_with_the_worker(tmp_path, temporary):
    config = of_a_user(tmp_path)
    luggage, settings = packed(config)
    (tmp_path / "code").rename(tmp_path / "gone")
    (tmp_path / "keys").rename(tmp_path / "no keys")
    with unpacked(luggage, settings) as found:
        place, _, name = found["reward"]["function"].rpartition(":")
        assert name == "score" and Path(place).is_relative_to(temporary)
        code = f"import sys; sys.path.insert(0, {str(Path(place).parent)!r}); import reward; print(reward.one)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"
        assert key_pair(found["replay"]["keys"], "worker").secret
        secret = Path(found["replay"]["keys"]) / "worker.key_secret"
        modes = [path.stat().st_mode & 0o777 for path in (secret, secret.parent, secret.parent.parent)]
        assert modes == [0o600, 0o700, 0o700]
        assert found["data"] == settings["data"] and settings["reward"]["function"].startswith(str(tmp_path))
    assert not list(temporary.iterdir())


def test_what_lies_there_already_is_used_there_and_another_state_of_it_is_not(tmp_path, temporary):
    luggage, settings = packed(of_a_user(tmp_path))
    with unpacked(luggage, settings) as found:
        assert found == settings and not list(temporary.iterdir())
    write(tmp_path / "code" / "near.py", "one = 2\n")
    with unpacked(luggage, settings) as found:
        place = Path(found["reward"]["function"].rpartition(":")[0])
        assert (place.parent / "near.py").read_text().endswith("one = 1\n")
        assert found["replay"] == settings["replay"]


def test_variables_travel_by_how_they_begin_or_by_name_and_one_that_is_not_set_is_refused():
    here = dict.fromkeys(("HF_TOKEN", "NCCL_DEBUG", "VLLM_USE_V1", "VLLM_HOST_IP", "MY_A", "MY_B", "HOME"), "x")
    assert set(travelling([], here)) == {"HF_TOKEN", "NCCL_DEBUG", "VLLM_USE_V1"}
    assert set(travelling(["MY_*", "VLLM_HOST_IP"], here)) == set(here) - {"HOME"}
    with pytest.raises(ConfigError, match=r"ray\.environment names 'MINE', but no such variable is set here"):
        travelling(["MINE"], here)


def test_contents_are_in_no_repr():
    luggage = Luggage(files={"/f.py": b"xyzzy"}, keys={"k": b"xyzzy"}, environment={"HF_TOKEN": "xyzzy"})
    assert "xyzzy" not in repr(luggage) and "xyzzy" not in f"{luggage}"


def test_paths_of_model_and_data_are_named_with_their_settings(tmp_path):
    config = of_a_user(tmp_path)
    config.model.path = str(write(tmp_path / "model" / "config.json", "{}").parent)
    config.eval.path = str(tmp_path / "*.jsonl")
    config.eval.sets = {"hub": "hf:some/rows", "own": str(tmp_path / "code" / "reward.py") + ":Rows"}
    assert local_paths(absolute_paths(config_to_dict(config))) == {
        str(tmp_path / "model"): "model.path",
        str(tmp_path / "rows.jsonl"): "data.path",
        str(tmp_path / "*.jsonl"): "eval.path",
    }


def test_what_a_killed_worker_was_sent_is_removed_from_its_node(temporary):
    keys = temporary / f"{PREFIX}killed" / "keys"
    for looks in (lambda: bury(str(temporary / "log")), lambda: lacking([])):
        write(keys / "worker.key_secret", "secret")
        write(keys.parent / HELD)
        write(temporary / "log", "its last line\n")
        looks()
        assert not keys.parent.exists()
    assert bury(str(temporary / "log")) == ["its last line"]
