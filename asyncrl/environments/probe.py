"""Whether an environment of the user, or one that runs code of the user, can be used: found out by a process of its
own, so that this code never runs in a command that only starts the others.

`python -m asyncrl.environments.probe SETTINGS ANSWER_FD PARENT_PID` is internal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress

from asyncrl.environments.registry import SETTING, find_environment, is_of_the_user
from asyncrl.errors import ConfigError
from asyncrl.family import die_with_parent
from asyncrl.rewards.process import describe_exit
from asyncrl.schema import EnvironmentConfig

IMPORT_S = 120.0
"""What importing it may take."""
MOST_BYTES = 8000
"""Of an answer: a pipe holds them without a reader."""
FINE = b"\0"


def check_environment(config: EnvironmentConfig, timeout_s: float = IMPORT_S) -> None:
    """As `find_environment`, of which only the refusal is wanted.

    Raises:
        ConfigError: what `find_environment` says, or that the import ended its process or took too long.
    """
    if not is_of_the_user(config.name) and not hasattr(find_environment(config), "check"):
        return
    read, write = os.pipe()
    try:
        os.set_blocking(read, False)  # a child of the import may keep the other end open
        said = json.dumps({"name": config.name, "args": dict(config.args)}, default=str)
        arguments = (said, str(write), str(os.getpid()))
        ended = subprocess.run(
            [sys.executable, "-m", "asyncrl.environments.probe", *arguments],
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
        answer = b""
        with suppress(BlockingIOError):
            answer = os.read(read, MOST_BYTES)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{SETTING}={config.name}: importing it took more than {timeout_s:g} s") from error
    finally:
        os.close(read)
        os.close(write)
    if not answer:
        how = describe_exit(ended.returncode)
        raise ConfigError(f"{SETTING}={config.name}: importing it ended its process ({how})")
    if answer != FINE:
        raise ConfigError(answer.decode(errors="replace"))


def main(settings: str, answer_fd: int, parent_pid: int) -> None:
    """Import it and say what there is to say."""
    die_with_parent(parent_pid)
    os.set_inheritable(answer_fd, False)
    try:
        config = EnvironmentConfig(**json.loads(settings))
        factory = find_environment(config)
        if not is_of_the_user(config.name):
            factory.check(**config.args)
        answer = FINE
    except ConfigError as error:
        answer = str(error).encode(errors="replace")[:MOST_BYTES]
    os.write(answer_fd, answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
