#!/usr/bin/env bash
# Installs asyncrl in a fresh clone, then runs the quickstart, which trains a tiny model. No GPU needed.
#
#   bash launchers/quickstart.sh [key=value ...]        for example: seed=1 replay.max_staleness=0 replay.pipeline_depth=0
#   bash launchers/quickstart.sh engine=vllm            installs vLLM too, and generates with it
#   bash launchers/quickstart.sh experiment=lora        trains and sends adapters only
#   bash launchers/quickstart.sh experiment=tools_quickstart   trains an agent that calls a calculator
#
# Each call overwrites runs/quickstart; run.name=NAME uses another folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launchers/install.sh
extras="" engine=""
for setting in "$@"; do
    [ "$setting" != engine=vllm ] || engine=vllm
    [[ "$setting" != *=lora ]] || extras="[lora]"
done
asyncrl_install "$extras" "$engine"
exec "$PYTHON" -m asyncrl.cli quickstart "$@"
