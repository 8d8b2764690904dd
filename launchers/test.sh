#!/usr/bin/env bash
# Everything a change has to pass: style, types, layers, tests, coverage of the parts that must not be wrong.
#
#   bash launchers/test.sh                    all of it
#   bash launchers/test.sh --long             the tests that the first leaves out for their length, and no others
#   bash launchers/test.sh -m "not slow"      arguments go to pytest, which then runs once, with them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launchers/install.sh
asyncrl_install "[dev,docs,gym,gymnasium,lora,wandb,math,judge,search,agents,verifiers]" vllm
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYRIGHT_PYTHON_IGNORE_WARNINGS=1

echo "== ruff"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
[ "$*" != "--long" ] || set -- -m "long and not gpu"
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
# Of what runs beside, $other is the shell: it is to end, and what it runs.
trap '[ -z "$other" ] || { pkill -P "$other" || true; kill "$other" 2>/dev/null || true; }; rm -f "$said"' EXIT

# beside COMMAND...: runs it beside what follows.
beside() {
    "$@" >"$said" 2>&1 &
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

# tests NAME ARGUMENTS...: pytest, under a heading; a failure is remembered, and the rest still runs.
tests() {
    echo "== pytest: $1"
    "$PYTHON" -m pytest "${@:2}" || failed=1
}

fast="not slow and not gpu" slow="slow and not unhurried and not long and not gpu"
# Rooms and files whose tests compute; in the others there are threads, sockets and processes.
sums=(tests/advantages tests/chat tests/data tests/engines tests/environments tests/evaluation tests/learner
    tests/test_{config,recipes,settings}.py)
# Of them and the losses, what judges results of arithmetic by a tolerance.
numbers=(tests/advantages tests/losses tests/engines/test_transformers.py
    tests/learner/test_{attention,critic,fused,logprobs,roles,targets,train}.py)
# The pure core of the replay, its wire format and the losses: wrong here means wrong silently.
core="asyncrl/losses/*,asyncrl/replay/*"
sockets="asyncrl/replay/server/loop.py,asyncrl/replay/client/client.py,asyncrl/replay/client/connection.py,asyncrl/replay/net/keys.py,*/__main__.py"
failed=0

static_checks_and_sums() {
    renice -n 10 "$BASHPID" >/dev/null # What runs beside has deadlines.
    echo "== pyright"
    "$PYTHON" -m pyright --pythonpath "$PYTHON" || failed=1
    echo "== lint-imports"
    "$(dirname "$PYTHON")/lint-imports" || failed=1
    echo "== docs"
    "$PYTHON" -m sphinx -W --keep-going -q -b html docs docs/_build/html || failed=1
    COVERAGE_FILE=.coverage.losses tests "losses" -m "$fast" --cov=asyncrl.losses --cov-report= tests/losses
    tests "sums" -m "$fast" "${sums[@]}"
    return "$failed"
}

engines_chaos_and_unhurried() {
    tests "slow: chaos, engines, weights" -m "$slow" tests/chaos tests/vllm tests/weights
    renice -n 10 "$BASHPID" >/dev/null
    tests "slow and unhurried" -m "slow and unhurried and not long and not gpu"
    return "$failed"
}

beside static_checks_and_sums
# Nothing but these is judged by its coverage, and whatever runs under it takes twice as long.
COVERAGE_FILE=.coverage.replay tests "replay" -m "$fast" --cov=asyncrl.replay --cov-report= tests/replay tests/chaos
tests "all other rooms" -m "$fast" tests --ignore=tests/replay --ignore=tests/chaos --ignore=tests/losses \
    "${sums[@]/#/--ignore=}"
joined || failed=1
"$PYTHON" -m coverage combine .coverage.losses .coverage.replay
"$PYTHON" -m coverage report --include="$core" --omit="$sockets" --fail-under=90 || failed=1
[ "$failed" -eq 0 ]

beside engines_chaos_and_unhurried
tests "slow: all other rooms" -m "$slow" tests --ignore=tests/chaos --ignore=tests/vllm --ignore=tests/weights
# A tolerance that holds with the instructions of this processor alone fails at somebody who has another.
ATEN_CPU_CAPABILITY=default tests "numbers, with the plainest instructions" -m "$fast" "${numbers[@]}"
joined || failed=1
exit "$failed"
