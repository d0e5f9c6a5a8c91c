#!/bin/bash
# examples/torchrun/run.sh [arguments of examples/cluster.py]
# Two workers on this machine. When one dies, torchrun ends the other and starts both again: at most 3 times. On several
# machines, in place of --standalone: --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29400 --rdzv-id=JOB
set -euo pipefail

# Without this, torch 2.13 hands its workers a store that still has the addresses of the dead ones, and with gloo those
# that are started again hang, or fail and use up a restart. The rendezvous has to be c10d, as here, and not "static".
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=3 \
    examples/cluster.py "$@"
