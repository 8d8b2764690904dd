#!/usr/bin/env bash
# From a fresh clone to a model that learned something: installs asyncrl, then runs the quickstart. No GPU needed.
#
#   bash launchers/quickstart.sh [key=value ...]        for example: seed=1 replay.max_staleness=0 replay.pipeline_depth=0
#
# A finished quickstart is run again from the start with overwrite=true.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launchers/install.sh
asyncrl_install ""
exec "$PYTHON" -m asyncrl.quickstart "$@"
