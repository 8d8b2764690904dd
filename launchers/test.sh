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
if [ $# -gt 0 ]; then
    echo "== pyright"
    "$PYTHON" -m pyright --pythonpath "$PYTHON"
    echo "== lint-imports"
    "$(dirname "$PYTHON")/lint-imports"
    echo "== pytest"
    "$PYTHON" -m pytest "$@"
    exit
fi

said="$(mktemp)" other=""
# Of what runs beside, $other is a shell, or by `exec` the command itself: both are to end.
trap '[ -z "$other" ] || { pkill -P "$other" || true; kill "$other" 2>/dev/null || true; }; rm -f "$said"' EXIT

# beside COMMAND...: runs it at a low priority, so that it costs those that a clock judges little more than idle time.
beside() {
    (
        renice -n 10 "$BASHPID" >/dev/null
        "$@"
    ) >"$said" 2>&1 &
    other=$!
}

# joined: waits for what was started beside, and shows what it said; its failure is ours.
joined() {
    local status=0
    wait "$other" || status=$?
    other=""
    cat "$said"
    return "$status"
}

static_checks_and_sums() {
    echo "== pyright"
    "$PYTHON" -m pyright --pythonpath "$PYTHON"
    echo "== lint-imports"
    "$(dirname "$PYTHON")/lint-imports"
    echo "== pytest: sums"
    COVERAGE_FILE=.coverage.sums "$PYTHON" -m pytest -m "not slow and not gpu" --cov=asyncrl.losses --cov-report= "${sums[@]}"
}

# The pure core of the replay, its wire format and the losses: wrong here means wrong silently.
core="asyncrl/losses/*,asyncrl/replay/*"
sockets="asyncrl/replay/server.py,asyncrl/replay/client.py,asyncrl/replay/connection.py,asyncrl/replay/security.py,*/__main__.py"
# Rooms whose tests compute; in the others there are threads, sockets and processes.
sums=(tests/advantages tests/data tests/engines tests/environments tests/learner tests/losses)
failed=0

beside static_checks_and_sums
echo "== pytest: threads, sockets and processes"
COVERAGE_FILE=.coverage.rest "$PYTHON" -m pytest -m "not slow and not gpu" --cov=asyncrl.replay --cov-report= \
    tests "${sums[@]/#/--ignore=}" || failed=1
joined || failed=1
"$PYTHON" -m coverage combine .coverage.sums .coverage.rest
"$PYTHON" -m coverage report --include="$core" --omit="$sockets" --fail-under=90 || failed=1
[ "$failed" -eq 0 ]

beside "$PYTHON" -m pytest -m "slow and unhurried and not gpu"
echo "== pytest: slow"
"$PYTHON" -m pytest -m "slow and not unhurried and not gpu" || failed=1
echo "== pytest: slow and unhurried"
joined || failed=1
exit "$failed"
