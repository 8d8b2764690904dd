#!/usr/bin/env bash
# From a fresh clone to a model that learned something: installs asyncrl, then runs the quickstart. No GPU needed.
#
#   bash launchers/quickstart.sh [key=value ...]        for example: seed=1 replay.max_staleness=0 replay.pipeline_depth=0
#
# Each call starts anew in runs/quickstart; run.name=NAME keeps a run apart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launchers/install.sh
asyncrl_install ""
exec "$PYTHON" -m asyncrl.quickstart "$@"
