"""torchrun with one rendezvous more: `python -m asyncrl.learner.torchrun --rdzv-backend=bound ...`, else as torchrun.

By this door rather than as a plugin of torch: a plugin would be loaded by every torchrun of the environment.
"""

from __future__ import annotations

import os
import sys

from asyncrl import collector

if __name__ == "__main__":
    collector.rest()

from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main as torchrun

from asyncrl.learner.launcher import LAUNCHER
from asyncrl.learner.rendezvous import BACKEND, make_rendezvous


def main() -> None:
    rendezvous_handler_registry.register(BACKEND, make_rendezvous)
    os.environ[LAUNCHER] = str(os.getpid())
    torchrun(sys.argv[1:])


if __name__ == "__main__":
    collector.wake()
    main()
