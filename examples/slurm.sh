#!/bin/bash
# Starts torchrun once on each node, which starts a rank for each GPU; the ranks meet at the first node.
#   sbatch examples/slurm.sh examples/torchrun.py /shared/checkpoints
#SBATCH --job-name=gradsync
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1  # torchrun; it starts the ranks
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00

set -euo pipefail
if [ $# -eq 0 ]; then
    echo "usage: sbatch $0 SCRIPT.py [ARGUMENTS]" >&2
    exit 2
fi

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ranks=${SLURM_GPUS_ON_NODE:-1} cpus=${SLURM_CPUS_PER_TASK:-1}
port=$((10000 + SLURM_JOB_ID % 20000)) # below the ports that systems give out, and not that of the next job

export OMP_NUM_THREADS=$((cpus > ranks ? cpus / ranks : 1)) # per rank
export SRUN_CPUS_PER_TASK=$cpus                             # srun does not take it over from sbatch
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1                 # else ranks that start again find addresses of before

exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="${hosts[0]}:$port" \
    "$@"
