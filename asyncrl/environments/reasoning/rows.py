"""`python -m asyncrl.environments.reasoning.rows TASK ... [--size N] [--seed S] [--config JSON] > rows.jsonl`

Rows for `environment=reasoning_gym`: the question, and the values from which it can be generated again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.environments.reasoning.environment import COLUMN
from asyncrl.environments.reasoning.tasks import entry_of, names
from asyncrl.environments.rows import print_rows


def rows(tasks: Sequence[str], size: int, seed: int, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `size` rows of each task, alternating between the tasks. Raises ConfigError: see `entry_of`."""
    for index in range(size):
        for task in tasks:
            made = entry_of(task, seed, size, index, json.dumps(config))
            origin = {"task": task, "seed": seed, "size": size, "index": index, "config": config}
            yield {
                "prompt": [{"role": "user", "content": made["question"]}],
                "answer": "" if made["answer"] is None else str(made["answer"]),
                "data_source": f"reasoning_gym/{task}",
                COLUMN: origin,
            }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.environments.reasoning.rows", description=__doc__)
    parser.add_argument("tasks", nargs="+", metavar="TASK", help="names of reasoning-gym, or `all`")
    parser.add_argument("--size", type=int, default=1000, help="rows of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=json.loads, default={}, help="settings of the task, as JSON")
    given = parser.parse_args(arguments)
    return print_rows(
        lambda: rows(names() if given.tasks == ["all"] else given.tasks, given.size, given.seed, given.config)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
