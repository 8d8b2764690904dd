"""How user environments are found, and what is refused before a start."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from asyncrl.environments.conversation import opening
from asyncrl.environments.guard import GuardedEnvironment
from asyncrl.environments.probe import check_environment
from asyncrl.environments.registry import find_environment, make_environment
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import ConfigError
from asyncrl.schema import EnvironmentConfig
from asyncrl.types import Prompt

FILE = """
class Sound:
    async def run(self, prompt, size, tools):
        raise NotImplementedError


class NoRun:
    pass


class Needy(Sound):
    def __init__(self, level):
        pass


class Broken(Sound):
    def __init__(self):
        raise OSError("no GPU")


def factory():
    return Sound()


def wrong_factory():
    return 3


number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


@pytest.mark.parametrize("name", ["Sound", "factory"])
def test_a_class_or_factory_is_found_and_guarded(own: Path, name: str) -> None:
    assert callable(find_environment(EnvironmentConfig(name=f"{own}:{name}")))
    assert isinstance(make_environment(EnvironmentConfig(name=f"{own}:{name}")), GuardedEnvironment)


def test_a_module_s_class_is_found_and_ours_is_not_guarded() -> None:
    spec = EnvironmentConfig(name="asyncrl.environments.single_turn:SingleTurn")
    assert find_environment(spec) is SingleTurn
    assert isinstance(make_environment(EnvironmentConfig()), SingleTurn)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Nobody", r"has no 'Nobody'. It defines: Broken, Needy, NoRun, Sound, factory, wrong_factory"),
        ("number", "is a int, not a function"),
        ("NoRun", r"NoRun has no run\(\). Give it `async def run\(self, prompt, size, tools\) -> Episodes`"),
        ("Needy", r"cannot be created: .*level.*It is called as Needy\("),
    ],
)
def test_a_name_that_is_no_environment_is_refused_before_a_start(own: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        find_environment(EnvironmentConfig(name=f"{own}:{name}"))
    assert "environment.name=" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "says"), [("wrong_factory", "the int it made has no run"), ("Broken", "OSError: no GPU")]
)
def test_what_cannot_be_made_is_a_refused_setting(own: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_environment(EnvironmentConfig(name=f"{own}:{name}"))


def test_a_script_that_exits_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="importing it failed: SystemExit: 0"):
        find_environment(EnvironmentConfig(name=f"{tmp_path}/script.py:Own"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.name=.*there is no file"):
        find_environment(EnvironmentConfig(name=f"{tmp_path}/none.py:Own"))


def test_a_cut_prompt_is_read_by_its_tokens_alone_and_refused_where_messages_are_read(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        f"{FILE}\n\nclass Game:\n    def reset(self, row): ...\n    def step(self, text): ...\n"
        "\n\ndef game():\n    return Game()\n\n\ndef sound():\n    return Sound()\n"
    )
    cut = Prompt(
        index=0, epoch=0, row=0, text="long", token_ids=np.arange(4, dtype=np.int32), columns={"prompt": "too long"}
    )
    assert opening(cut) == [{"role": "user", "content": "too long"}], "else it need not be refused"
    game, sound = (EnvironmentConfig(name=f"{tmp_path}/own.py:{name}") for name in ("Game", "Sound"))
    for name in ("game", "sound"):
        made = EnvironmentConfig(name=f"{tmp_path}/own.py:{name}")
        with (
            contextlib.nullcontext()
            if name == "sound"
            else pytest.raises(ConfigError, match="first request from the whole row")
        ):
            check_environment(made, overlong="truncate_left")
    with pytest.raises(ConfigError, match="makes its first request from the whole row"):
        make_environment(game, overlong="truncate_left")
    with pytest.raises(ConfigError, match="makes its first request from the whole row"):
        check_environment(game, overlong="truncate_right")
    for fine in (sound, EnvironmentConfig()):
        make_environment(fine, overlong="truncate_left")
    make_environment(game, overlong="error")
