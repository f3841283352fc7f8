#!/usr/bin/env bash
# Step 3: Llama 3.1 8B on C4, TP4 x FSDP16, full checkpointing: 4.71 of 24 GiB per core.
#
#   titan/llama_c4_tp4_fsdp16_full.sh [--dry-run] [options of torchtitan.train]
family=llama3
config=simple_fsdp_llama3_8b_fullac
tutorial=(
    --training.global_batch_size 64 # the layout would change it: one sequence per data-parallel rank
    --dataloader.dataset c4
    --parallelism.tensor_parallel_degree=4
    --parallelism.data_parallel_shard_degree=-1
    ${STEPS:+--training.steps "$STEPS"}
)
debug=(
    --training.global_batch_size 8
    --parallelism.tensor_parallel_degree=2
    --parallelism.data_parallel_shard_degree=-1
)
source "$(dirname "$0")/launch.sh" || exit 2
launch "$@"
