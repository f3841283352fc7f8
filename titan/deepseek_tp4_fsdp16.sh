#!/usr/bin/env bash
# Step 2: DeepSeek-V3 16B, selective activation checkpointing, TP4 x FSDP16: ten steps on c4_test.
#
#   titan/deepseek_tp4_fsdp16.sh [--dry-run] [options of torchtitan.train]
family=deepseek_v3
config=simple_fsdp_deepseek_v3_16b_nki_tp4_fsdp16
tutorial=(--training.steps "${STEPS:-10}" --dataloader.dataset c4_test)
debug=()
source "$(dirname "$0")/launch.sh" || exit 2
launch "$@"
