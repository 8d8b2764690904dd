"""`python -m asyncrl.cli`: the command `asyncrl`."""

import sys

from asyncrl.cli.main import main

sys.exit(main())
