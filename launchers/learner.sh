#!/usr/bin/env bash
# The learner on one machine or several: run this on each of them with the same settings.
#
#   NNODES=2 NPROC_PER_NODE=8 RDZV_ENDPOINT=HOST:29400 RUN_ID=my-run bash launchers/learner.sh key=value ...
#
# HOST is one of the learner machines; RUN_ID is any word, the same on all of them. Both are needed from two machines on.
set -euo pipefail
nnodes="${NNODES:-1}"
if [ "$nnodes" != 1 ] && [ -z "${RDZV_ENDPOINT:-}" ]; then
    echo "NNODES=$nnodes needs RDZV_ENDPOINT=HOST:PORT, where HOST is one of the learner machines" >&2
    exit 2
fi
# Without it a rank that is killed takes the store of the next rendezvous with it, and one death burns restarts.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes="$nnodes" \
    --nproc-per-node="${NPROC_PER_NODE:-1}" \
    --max-restarts="${MAX_RESTARTS:-3}" \
    --rdzv-id="${RUN_ID:-run-$(date +%s)-$$}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${RDZV_ENDPOINT:-127.0.0.1:0}" \
    -m asyncrl.learner "$@"
