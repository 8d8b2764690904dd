"""`python -m asyncrl`: the command `asyncrl`."""

import sys

from asyncrl.cli.main import main

sys.exit(main())
