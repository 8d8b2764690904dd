#!/usr/bin/env bash
# Everything a change has to pass: style, types, layers, tests, coverage of the parts that must not be wrong.
#
#   bash launchers/test.sh                    all of it
#   bash launchers/test.sh -m "not slow"      arguments go to pytest, which then runs once, with them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launchers/install.sh
asyncrl_install "[dev,gym,lora,wandb]" vllm
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYRIGHT_PYTHON_IGNORE_WARNINGS=1

echo "== ruff"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
echo "== pyright"
"$PYTHON" -m pyright --pythonpath "$PYTHON"
echo "== lint-imports"
"$(dirname "$PYTHON")/lint-imports"

# The pure core of the replay, its wire format and the losses: wrong here means wrong silently.
core="asyncrl/losses/*,asyncrl/replay/*"
sockets="asyncrl/replay/server.py,asyncrl/replay/client.py,asyncrl/replay/connection.py,asyncrl/replay/security.py,*/__main__.py"
echo "== pytest"
if [ $# -gt 0 ]; then
    "$PYTHON" -m pytest "$@"
else
    "$PYTHON" -m pytest -m "not slow and not gpu" --cov=asyncrl.losses --cov=asyncrl.replay --cov-report=
    "$PYTHON" -m pytest -m "slow and not gpu"
    "$PYTHON" -m coverage report --include="$core" --omit="$sockets" --fail-under=90
fi
