#!/usr/bin/env bash
# The replay server: one small CPU process that the learner and the rollout workers connect to.
#
#   bash launchers/replay.sh replay.address=tcp://HOST:5577 replay.keys=DIR key=value ...
#
# Give it the same settings as the other two: it refuses peers whose shared settings differ.
# With --dry-run it prints the plan and starts nothing.
set -euo pipefail
for argument in "$@"; do
    [ "$argument" != --dry-run ] || exec "${PYTHON:-python3}" -m asyncrl replay "$@"
done
exec "${PYTHON:-python3}" -m asyncrl.replay "$@"
