#!/usr/bin/env bash
# Train on several nodes with torchrun. Start one command on each node:
#
#   NODES=2 HEAD=node-0 NODE_RANK=0 bash examples/cluster/torchrun.sh --model_name mine --dataset_dir data/chat_sft …
#   NODES=2 HEAD=node-0 NODE_RANK=1 bash examples/cluster/torchrun.sh --model_name mine --dataset_dir data/chat_sft …
#
# Every node needs the same code, the same package versions, and the same folders at the same paths. To check this:
#
#   NODES=2 HEAD=node-0 NODE_RANK=0 DOCTOR=only bash examples/cluster/torchrun.sh --shared checkpoints
#
# NODES      number of nodes
# HEAD       name or address of one node that all others can reach
# PORT       a free port on HEAD (29500)
# NODE_RANK  0 on HEAD, 1, 2, … on the others: fixed node ranks ("static"), the simplest way. Without NODE_RANK, the
#            rendezvous assigns node ranks ("c10d"): start the same command on all nodes, and again on a node that failed
# RUN_ID     id of the c10d rendezvous: the same on all nodes, and different for runs at the same time (chatmill)
# GPUS       processes on each node (all GPUs, or 1 without GPUs)
# RESTARTS   how often torchrun restarts all ranks after one failed (0); they resume from the last checkpoint
# DOCTOR     "only": check the nodes instead of training
#
# If the nodes have several network interfaces, name the one that connects them:
#   export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
set -euo pipefail

NODES=${NODES:?set it to the number of nodes}
HEAD=${HEAD:?set it to the name of a node that all others can reach}
PORT=${PORT:-29500}
GPUS=${GPUS:-gpu}
if [ "$GPUS" = gpu ] && ! command -v nvidia-smi >/dev/null; then GPUS=1; fi

rendezvous=(--nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts "${RESTARTS:-0}")
if [ -n "${NODE_RANK:-}" ]; then
    # Static: node 0 listens, all others connect to it.
    rendezvous+=(--node-rank "$NODE_RANK" --master-addr "$HEAD" --master-port "$PORT")
else
    # c10d: HEAD listens, and node ranks are assigned in the order of arrival.
    rendezvous+=(--rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "${RUN_ID:-chatmill}")
fi

# After SIGTERM or Ctrl-C the ranks finish their step and write a checkpoint. By default torchrun kills them after 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
# Restarted ranks need a new store: the old one still has the addresses of the ranks that ended.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
# One CPU thread per process for each operator, unless you set another number.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
if [ "${DOCTOR:-}" = only ]; then
    exec torchrun "${rendezvous[@]}" -m chatmill.train.doctor "$@"
fi
# --resume auto resumes from the newest checkpoint, or starts a new run if there is none: a restart uses the same command.
exec torchrun "${rendezvous[@]}" train.py --resume auto "$@"
