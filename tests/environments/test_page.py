"""docs/environments.md: its programs are run by tests/rollout and tests/integration, its commands are accepted."""

from __future__ import annotations

import re
import shlex

from asyncrl.config import load_config
from tests.environments.pages import PAGE, programs

REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:f"]


def test_every_block_of_code_is_a_program_that_other_tests_run() -> None:
    assert set(programs()) == {"second_try.py", "taught.py"}
    assert len(re.findall(r"^```\w", PAGE.read_text(), flags=re.MULTILINE)) == 2


def test_every_command_of_the_page_is_accepted() -> None:
    commands = re.findall(r"^    (?:\w+=\S+ )?asyncrl local \.\.\. (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    configs = [load_config([*REQUIRED, *shlex.split(command)]) for command in commands]
    names = ["second_try.py:SecondTry", "taught.py:Taught", "taught.py:Taught"]
    assert [config.environment.name for config in configs] == names
    assert [config.reference.from_rollout for config in configs] == [False, True, True]
