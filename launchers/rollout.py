"""Start rollout workers as Ray actors on the cluster at `ray.address` and keep them until the run is over.

    python launchers/rollout.py ray.address=auto rollout.workers=8 replay.address=tcp://HOST:PORT key=value ...

Run it on one machine of the Ray cluster; Ray spreads the workers. Every machine needs asyncrl installed, and the files
named by model.path, data.path and reward.function under the same paths.
"""

from __future__ import annotations

import sys

from asyncrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["rollout", *sys.argv[1:]]))
