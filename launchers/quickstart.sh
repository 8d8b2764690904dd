#!/usr/bin/env bash
# From a fresh clone to a model that learned something: installs asyncrl, then runs the quickstart. No GPU needed.
#
#   bash launchers/quickstart.sh [key=value ...]        for example: seed=1 replay.max_staleness=0 replay.pipeline_depth=0
#   bash launchers/quickstart.sh engine=vllm            installs vLLM too, and generates with it
#   bash launchers/quickstart.sh experiment=lora        trains and sends adapters only
#   bash launchers/quickstart.sh experiment=tools_quickstart   trains an agent that calls a calculator
#
# Each call starts anew in runs/quickstart; run.name=NAME keeps a run apart.
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
