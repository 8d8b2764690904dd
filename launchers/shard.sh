#!/usr/bin/env bash
# One shard of the replay's payloads, for runs of several thousand GPUs (docs/scale.md); start replay.shards of them.
#
#   bash launchers/shard.sh 0 replay.shards=2 replay.shard_address=tcp://HOST:5580 replay.address=... key=value ...
#
# Give it the same settings as the replay server, a number from 0 on, and an address of its own. Its journal is in
# run.dir/journal/shard-N on its machine: if it is restarted there, nothing is lost.
# With --dry-run it prints the plan and starts nothing.
set -euo pipefail
for argument in "$@"; do
    [ "$argument" != --dry-run ] || exec "${PYTHON:-python3}" -m asyncrl shard "$@"
done
exec "${PYTHON:-python3}" -m asyncrl.replay.shards "$@"
