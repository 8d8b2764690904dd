#!/usr/bin/env bash
# The learner on one machine or several: run this on each of them with the same settings.
#
#   NPROC_PER_NODE=8 bash launchers/learner.sh key=value ...                                        # one machine
#   NNODES=2 NODE_RANK=0 RDZV_ENDPOINT=10.0.0.6:29400 NPROC_PER_NODE=8 \
#       bash launchers/learner.sh key=value ...                                                     # NODE_RANK=1 on the other
#
# With --dry-run it prints the plan for this number of ranks, like `asyncrl learner --dry-run`, and starts nothing.
#
# MODULE=asyncrl.sft starts the ranks of `asyncrl sft` in the same way.
#
# RDZV_ENDPOINT is an address of machine 0: the ranks' stores listen there and on no other interface. INTERFACE=eth1 keeps
# the ranks' own connections (gloo, nccl) to one interface of each machine; without it gloo's are on the one that leads to
# RDZV_ENDPOINT. None of these ports authenticates its peers: keep them behind a firewall or in a tunnel (SECURITY.md).
#
# RDZV_BACKEND=c10d, with NNODES=1:4 and resume=auto, lets machines join and leave while the run goes on. It needs RUN_ID,
# any word, the same on all machines. It listens on every interface of machine 0, and anyone who can reach its port can
# run code as you. A machine that leaves is a restart.
#
# MAX_RESTARTS (3; 20 with c10d) limits restarts in a row, without a checkpoint saved in between.
set -euo pipefail
module="${MODULE:-asyncrl.learner}"
nnodes="${NNODES:-1}"
ranks="${NPROC_PER_NODE:-1}"
planned=() # unknown if torchrun counts the ranks itself
if [[ "$ranks" =~ ^[0-9]+$ ]]; then
    planned=("learner.ranks=$ranks") # `asyncrl sft` looks at the GPUs of this machine
    [ "$module" != asyncrl.learner ] || planned=("learner.ranks=$((${nnodes%%:*} * ranks))")
fi
for argument in "$@"; do
    # torchrun would pass it to each rank as a setting.
    [ "$argument" != --dry-run ] || exec "${PYTHON:-python3}" -m asyncrl "${module#asyncrl.}" "$@" "${planned[@]}"
done
backend="${RDZV_BACKEND:-bound}"
restarts=3
[ "$backend" != c10d ] || restarts=20 # each machine that leaves costs one
if [ "$nnodes" != 1 ] && [ -z "${RDZV_ENDPOINT:-}" ]; then
    echo "NNODES=$nnodes needs RDZV_ENDPOINT=HOST:PORT, where HOST is an address of one of the learner machines" >&2
    exit 2
fi
if [ "$nnodes" != 1 ] && [ "$backend" = bound ] && [ -z "${NODE_RANK:-}" ]; then
    echo "NNODES=$nnodes needs NODE_RANK: 0 on the machine of RDZV_ENDPOINT, 1, 2, ... on the others" >&2
    exit 2
fi
if [ "$nnodes" != 1 ] && [ "$backend" != bound ] && [ -z "${RUN_ID:-}" ]; then
    echo "RDZV_BACKEND=$backend with NNODES=$nnodes needs RUN_ID: any word, the same on all machines" >&2
    exit 2
fi
if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="$INTERFACE"
fi
# A new start must not look like a restart of the one before, which goes on without a resume.
id="${RUN_ID:-run}-$(date +%s)-$$"
[ "$nnodes" = 1 ] || [ "$backend" = bound ] || id="$RUN_ID" # machines that join later must give the same
# With c10d a rank that is killed would otherwise take the store of the next rendezvous with it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" -m asyncrl.learner.torchrun \
    --nnodes="$nnodes" \
    --nproc-per-node="$ranks" \
    --max-restarts="${MAX_RESTARTS:-$restarts}" \
    --rdzv-id="$id" \
    --rdzv-backend="$backend" \
    --rdzv-endpoint="${RDZV_ENDPOINT:-127.0.0.1:0}" \
    --rdzv-conf="rank=${NODE_RANK:-0}" \
    --log-dir=/dev/null \
    -m "$module" "$@"
