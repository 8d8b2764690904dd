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
"$PYTHON" -m compileall -qq tests benchmarks || true # as in install.sh: tests start hundreds of processes
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

notes="$(mktemp -d)" others=() lower=""
# Each of $others is a shell: it is to end, and what it runs.
trap 'for other in "${others[@]}"; do pkill -P "$other" || true; kill "$other" 2>/dev/null || true; done; rm -rf "$notes"' EXIT

# beside LANE: runs it beside what follows.
beside() {
    "$1" >"$notes/said by ${#others[@]}" 2>&1 &
    others+=("$!")
}

# joined: waits for all that was started beside, and shows what it said.
joined() {
    local place status
    for place in "${!others[@]}"; do
        status=0
        wait "${others[place]}" || status=$?
        unset "others[place]"
        cat "$notes/said by $place"
        [ "$status" -eq 0 ] || wrong "what ran beside ended with $status"
    done
}

# wrong WHAT: fails the script in the end, which says it again; the rest still runs.
wrong() {
    echo "$1" >>"$notes/failed"
}

# tests NAME ARGUMENTS...: pytest, under a heading. Where no more than five tests failed, and pytest itself came to its
# end, they are left to `alone`.
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

# alone: what failed beside something else, once more with the machine for itself, and what fails then a last time. What
# passes now is told in the end.
alone() {
    local again names
    for again in "$notes"/lane.*/again; do
        [ -e "$again" ] || continue
        names="$(sed -n 's/^ *"\(.*\)": true,\{0,1\}$/\1/p' "${again%/again}/v/cache/lastfailed")"
        echo "== pytest: once more, alone:"
        echo "$names"
        if bash "$again" || bash "$again"; then echo "$names" >>"$notes/flaky"; else wrong "$names"; fi
        rm "$again"
    done
}

# verdict: the last word, where nobody overlooks it.
verdict() {
    if [ -e "$notes/flaky" ]; then
        echo "== FLAKY: failed beside others, passed alone:"
        cat "$notes/flaky"
    fi
    [ -e "$notes/failed" ] || return 0
    echo "== FAILED:"
    cat "$notes/failed"
    return 1
}

fast="not slow and not gpu" slow="slow and not unhurried and not long and not gpu"
unhurried="slow and unhurried and not long and not gpu"
# Rooms and files whose tests compute, or wait for what nobody judges by a clock; in the others there are threads,
# sockets and processes. Each line is a portion that any lane may take: the long ones first, or all wait for one.
sums=(
    "tests/cli/test_cli.py tests/test_config.py tests/cli/starting/test_preflight.py tests/test_recipes.py
        tests/test_refused_engines.py tests/test_refused_learning.py tests/cli/test_settings.py"
    "tests/chat tests/engines tests/environments tests/evaluation"
    "tests/learner"
    "tests/advantages tests/checks tests/data tests/evaluator tests/planner tests/sft tests/cli/test_verify.py"
)
other_rooms=(tests --ignore=tests/replay --ignore=tests/chaos --ignore=tests/losses)
for path in ${sums[*]}; do other_rooms+=("--ignore=$path"); done
# Of the slow tests with deadlines, one lane has those that start Ray, one those of vLLM; what is left goes to either.
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
# Of the fast ones, what judges results of arithmetic by a tolerance.
numbers=(tests/advantages tests/losses tests/engines/test_transformers.py
    tests/learner/model/test_{attention,critic,fused,logprobs}.py tests/learner/step/test_targets.py
    tests/learner/test_{roles,train}.py)
# The pure core of the replay, its wire format and the losses: wrong here means wrong silently.
core="asyncrl/losses/*,asyncrl/replay/*"
sockets="asyncrl/replay/server/loop.py,asyncrl/replay/client/client.py,asyncrl/replay/client/connection.py,asyncrl/replay/net/keys.py,*/__main__.py"

all_other_rooms() {
    tests "all other rooms" -m "$fast" "${other_rooms[@]}"
    later "sums" "$fast" "${sums[@]}"
}

static_checks_and_sums() {
    renice -n 10 "$BASHPID" >/dev/null # What runs beside has deadlines.
    echo "== pyright"
    "$PYTHON" -m pyright --pythonpath "$PYTHON" || wrong pyright
    echo "== lint-imports"
    "$(dirname "$PYTHON")/lint-imports" || wrong lint-imports
    echo "== docs"
    "$PYTHON" -m sphinx -W --keep-going -q -b html docs docs/_build/html || wrong docs
    COVERAGE_FILE=.coverage.losses tests "losses" -m "$fast" --cov=asyncrl.losses --cov-report= tests/losses
    later "sums" "$fast" "${sums[@]}"
}

slow_engines_and_chaos() {
    tests "slow: chaos, engines, weights" -m "$slow" $engines_and_chaos
    shared "slow: the rest" "$slow" "${slow_rest[@]}"
    later "slow and unhurried" "$unhurried" "${unhurried_tests[@]}"
}

unhurried_and_numbers() {
    renice -n 10 "$BASHPID" >/dev/null
    # A tolerance that holds with the instructions of this processor alone fails at somebody who has another.
    ATEN_CPU_CAPABILITY=default tests "numbers, with the plainest instructions" -m "$fast" "${numbers[@]}"
    later "slow and unhurried" "$unhurried" "${unhurried_tests[@]}"
}

beside all_other_rooms
beside static_checks_and_sums
# Nothing but these is judged by its coverage, and whatever runs under it takes twice as long.
COVERAGE_FILE=.coverage.replay tests "replay" -m "$fast" --cov=asyncrl.replay --cov-report= tests/replay tests/chaos
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
