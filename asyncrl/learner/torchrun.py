"""torchrun with one rendezvous more: `python -m asyncrl.learner.torchrun --rdzv-backend=bound ...`, else as torchrun.

By this door rather than as a plugin of torch: a plugin would be loaded by every torchrun of the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from asyncrl import collector
from asyncrl.learner.ahead import Ahead, ranks_and_command

if __name__ == "__main__":
    collector.rest()
    begun = Ahead(*ranks_and_command(sys.argv[1:], os.environ))

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, handlers
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main as torchrun

from asyncrl.learner.launcher import LAUNCHER
from asyncrl.learner.rendezvous import BACKEND, make_rendezvous


def take_first(begun: Ahead) -> None:
    """Have torchrun take the ranks that have `begun`, each at its first start, instead of starting them."""

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[Any, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
            # One whose output goes to files of its own has to be started with them.
            command = args if self._stdout is None and self._stderr is None else ()
            return begun.take(self.local_rank_id, command, env) or super()._popen(args, env)

    handlers.SubprocessHandler = Handler  # pyright: ignore[reportPrivateImportUsage]


def main(begun: Ahead) -> None:
    take_first(begun)
    rendezvous_handler_registry.register(BACKEND, make_rendezvous)
    os.environ[LAUNCHER] = str(os.getpid())
    torchrun(sys.argv[1:])


if __name__ == "__main__":
    collector.wake()
    main(begun)
