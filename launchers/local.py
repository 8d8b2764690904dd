"""Start a run with all its processes on this machine, from a checkout.

`python launchers/local.py key=value ...` does what `asyncrl local key=value ...` does.
"""

from __future__ import annotations

import sys

from asyncrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["local", *sys.argv[1:]]))
