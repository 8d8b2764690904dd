#!/usr/bin/env bash
# All checks that a change must pass: style, types, layers, tests, and coverage of the critical parts.
#
#   bash launchers/test.sh                    all of it
#   bash launchers/test.sh --long             only the tests that the first leaves out because they are long
#   bash launchers/test.sh -m "not slow"      arguments, also those after --long, are passed to pytest, which then runs once
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launchers/install.sh
asyncrl_install "[dev,docs,gym,gymnasium,lora,wandb,math,judge,search,agents,verifiers]" vllm
"$PYTHON" -m compileall -qq tests benchmarks || true # as in install.sh: tests start hundreds of processes
unset PYTHONDONTWRITEBYTECODE # pytest keeps the tests as it rewrites them, or every lane does it again
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYRIGHT_PYTHON_IGNORE_WARNINGS=1

echo "== ruff"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
[ "${1:-}" != --long ] || set -- -m "long and not gpu" "${@:2}"
if [ $# -gt 0 ]; then
    echo "== pyright"
    "$PYTHON" -m pyright --pythonpath "$PYTHON"
    echo "== lint-imports"
    "$(dirname "$PYTHON")/lint-imports"
    echo "== pytest"
    "$PYTHON" -m pytest "$@"
    exit
fi

notes="$(mktemp -d)" others=() lower=""
# Each of $others is a shell: end it and the processes that it runs.
trap 'for other in "${others[@]}"; do pkill -P "$other" || true; kill "$other" 2>/dev/null || true; done; rm -rf "$notes"' EXIT

# beside LANE: runs the lane in the background.
beside() {
    "$1" >"$notes/said by ${#others[@]}" 2>&1 &
    others+=("$!")
}

# joined: waits for all background lanes and shows their output.
joined() {
    local place status
    for place in "${!others[@]}"; do
        status=0
        wait "${others[place]}" || status=$?
        unset "others[place]"
        cat "$notes/said by $place"
        [ "$status" -eq 0 ] || wrong "a background lane ended with $status"
    done
}

# wrong WHAT: notes a failure. The rest still runs; in the end the script prints it again and fails.
wrong() {
    echo "$1" >>"$notes/failed"
}

# tests NAME ARGUMENTS...: runs pytest under a heading. If pytest itself finished and at most five tests failed, `alone`
# repeats them.
tests() {
    echo "== pytest: $1"
    local lane names status=0
    lane="$(mktemp -d "$notes/lane.XXXXXX")"
    $lower "$PYTHON" -m pytest -o cache_dir="$lane" "${@:2}" || status=$?
    [ "$status" -ne 0 ] || return 0
    names="$lane/v/cache/lastfailed"
    if [ "$status" -eq 1 ] && [ -e "$names" ] && [ "$(grep -c '": true' "$names")" -le 5 ]; then
        { # The exports are part of it: COVERAGE_FILE, what the processor may do.
            export -p
            printf '%q ' "$PYTHON" -m pytest -o cache_dir="$lane" "${@:2}" --lf --lfnf=none --cov-append
        } >"$lane/again"
    else
        wrong "pytest: $1 ended with $status"
    fi
}

# shared NAME MARKS PORTION...: of the portions, one after the other, those that no lane has taken.
shared() {
    local place=0 portion
    for portion in "${@:3}"; do
        place=$((place + 1))
        # Portions are words: paths and --ignore=PATH.
        if mkdir "$notes/$1 $place" 2>/dev/null; then tests "$1 $place" -m "$2" $portion; fi
    done
}

# later NAME MARKS PORTION...: the same at a low priority: in other lanes may still run tests with deadlines. All lanes
# end with this, and so within one portion of each other.
later() {
    local lower
    lower="nice -n $((10 - $(nice)))"
    shared "$@"
}

# alone: repeats the failed tests while nothing else runs, and once more if they fail again. Tests that pass now are listed
# in the end as flaky.
alone() {
    local again names
    for again in "$notes"/lane.*/again; do
        [ -e "$again" ] || continue
        names="$(sed -n 's/^ *"\(.*\)": true,\{0,1\}$/\1/p' "${again%/again}/v/cache/lastfailed")"
        echo "== pytest: repeated alone:"
        echo "$names"
        if bash "$again" || bash "$again"; then echo "$names" >>"$notes/flaky"; else wrong "$names"; fi
        rm "$again"
    done
}

# verdict: prints flaky and failed tests as the last output.
verdict() {
    if [ -e "$notes/flaky" ]; then
        echo "== FLAKY: failed with others running, passed alone:"
        cat "$notes/flaky"
    fi
    [ -e "$notes/failed" ] || return 0
    echo "== FAILED:"
    cat "$notes/failed"
    return 1
}

fast="not slow and not gpu" slow="slow and not unhurried and not long and not gpu"
unhurried="slow and unhurried and not long and not gpu"
# Folders and files whose tests only compute, or wait without deadlines; the others have threads, sockets and processes.
# Each line is a portion that any lane may take. The long ones come first, or all lanes would wait for one.
sums=(
    "tests/cli/test_cli.py tests/test_config.py tests/cli/starting/test_preflight.py tests/test_recipes.py
        tests/test_refused_engines.py tests/test_refused_learning.py tests/cli/test_settings.py"
    "tests/chat tests/engines tests/environments tests/evaluation"
    "tests/learner"
    "tests/advantages tests/checks tests/data tests/evaluator tests/planner tests/sft tests/cli/test_verify.py"
)
other_rooms=(tests --ignore=tests/replay --ignore=tests/chaos --ignore=tests/losses
    --ignore=tests/settings --ignore=tests/test_balance.py)
for path in ${sums[*]}; do other_rooms+=("--ignore=$path"); done
# Of the slow tests with deadlines, one lane runs those that start Ray, another those of vLLM; either takes the rest.
with_ray="tests/rollout tests/integration/test_deaths.py tests/integration/test_loop.py
    tests/integration/test_placement.py tests/integration/test_vllm.py"
engines_and_chaos="tests/chaos tests/vllm tests/weights"
slow_rest=("tests/integration" "tests --ignore=tests/integration")
for path in $with_ray $engines_and_chaos; do slow_rest=("${slow_rest[@]/%/ --ignore=$path}"); done
unhurried_tests=(
    "tests/test_benchmarks.py"
    "tests/integration"
    "tests --ignore=tests/learner --ignore=tests/test_benchmarks.py --ignore=tests/integration"
    "tests/learner"
)
# Fast tests that compare results of arithmetic with a tolerance.
numbers=(tests/advantages tests/losses tests/engines/test_transformers.py
    tests/learner/model/test_{attention,critic,fused,logprobs}.py tests/learner/step/test_targets.py
    tests/learner/test_{roles,train}.py)
# The losses, the pure core of the replay, its wire format, and what these rest on: mistakes would be silent there.
core="asyncrl/balance.py,asyncrl/losses/*,asyncrl/recorded.py,asyncrl/replay/*,asyncrl/settings/loss/*"
of_the_replay="--cov=asyncrl.replay --cov=asyncrl.balance --cov=asyncrl.recorded"
sockets="asyncrl/replay/server/loop.py,asyncrl/replay/client/client.py,asyncrl/replay/client/connection.py,asyncrl/replay/net/keys.py,*/__main__.py"

all_other_rooms() {
    tests "all other rooms" -m "$fast" "${other_rooms[@]}"
    later "sums" "$fast" "${sums[@]}"
}

static_checks_and_sums() {
    renice -n 10 "$BASHPID" >/dev/null # Tests in other lanes have deadlines.
    echo "== pyright"
    "$PYTHON" -m pyright --pythonpath "$PYTHON" || wrong pyright
    echo "== lint-imports"
    "$(dirname "$PYTHON")/lint-imports" || wrong lint-imports
    echo "== docs"
    "$PYTHON" -m sphinx -W --keep-going -q -b html docs docs/_build/html || wrong docs
    COVERAGE_FILE=.coverage.losses tests "losses" -m "$fast" --cov=asyncrl.losses --cov=asyncrl.settings.loss --cov-report= \
        tests/losses tests/settings
    later "sums" "$fast" "${sums[@]}"
}

slow_engines_and_chaos() {
    tests "slow: chaos, engines, weights" -m "$slow" $engines_and_chaos
    shared "slow: the rest" "$slow" "${slow_rest[@]}"
    later "slow and unhurried" "$unhurried" "${unhurried_tests[@]}"
}

unhurried_and_numbers() {
    renice -n 10 "$BASHPID" >/dev/null
    # A tolerance that only holds with this processor's instructions would fail on others.
    ATEN_CPU_CAPABILITY=default tests "numbers, with the plainest instructions" -m "$fast" "${numbers[@]}"
    later "slow and unhurried" "$unhurried" "${unhurried_tests[@]}"
}

beside all_other_rooms
beside static_checks_and_sums
# Coverage is only measured here, because tests take twice as long with it.
COVERAGE_FILE=.coverage.replay tests "replay" -m "$fast" $of_the_replay --cov-report= \
    tests/replay tests/chaos tests/test_balance.py
later "sums" "$fast" "${sums[@]}"
joined
alone
{
    "$PYTHON" -m coverage combine .coverage.losses .coverage.replay &&
        "$PYTHON" -m coverage report --include="$core" --omit="$sockets" --fail-under=90
} || wrong coverage
verdict

beside slow_engines_and_chaos
beside unhurried_and_numbers
tests "slow: with Ray" -m "$slow" $with_ray
shared "slow: the rest" "$slow" "${slow_rest[@]}"
later "slow and unhurried" "$unhurried" "${unhurried_tests[@]}"
joined
alone
verdict
