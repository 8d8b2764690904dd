"""`python -m asyncrl.environments.verifiers.rows TASKSET [--take N] [--path DIR] [--env JSON] > rows.jsonl`

Rows for `environment=verifiers`: what a task asks, and its data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import verifiers.v1 as vf

from asyncrl.environments.rows import print_rows
from asyncrl.environments.verifiers.environment import COLUMN
from asyncrl.environments.verifiers.host import built
from asyncrl.errors import ConfigError


def rows(taskset: vf.Taskset, take: int | None) -> Iterator[dict[str, Any]]:
    """Yield the first `take` tasks, or all if it is None. Raises ConfigError if all of an unbounded taskset are
    requested."""
    if take is None and not taskset.bounded:
        raise ConfigError("this taskset has no end. Give the number of tasks: --take N")
    for task in itertools.islice(taskset, take):
        data = task.data.model_dump(mode="json", exclude_none=True)
        asked = task.data.prompt_text or f"task {task.data.idx}"
        yield {"prompt": [{"role": "user", "content": asked}], "data_source": taskset.config.id, COLUMN: data}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.environments.verifiers.rows", description=__doc__)
    parser.add_argument("taskset", metavar="TASKSET", help="name of the package")
    parser.add_argument("--take", type=int, help="tasks from the first on; all without it")
    parser.add_argument("--path", default="", help="folder with the package, where it is not installed")
    parser.add_argument("--env", type=json.loads, default={}, help="as environment.args.env, as JSON")
    given = parser.parse_args(arguments)
    if given.path:
        sys.path.insert(0, given.path)
    settings: Mapping[str, Any] = {"taskset": given.taskset, "harness": "", "env": given.env, "uv": True}
    return print_rows(lambda: rows(built(settings).taskset, given.take))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
