#!/usr/bin/env bash
# Step 3: DeepSeek-V3 16B on C4, TP4 x FSDP16, selective activation checkpointing.
#
#   titan/deepseek_c4_tp4_fsdp16_selective.sh [--dry-run] [options of torchtitan.train]
family=deepseek_v3
config=simple_fsdp_deepseek_v3_16b_nki_tp4_fsdp16
tutorial=(--dataloader.dataset c4 --hf_assets_path=./assets/hf/deepseek-moe-16b-base ${STEPS:+--training.steps "$STEPS"})
debug=()
source "$(dirname "$0")/launch.sh" || exit 2
launch "$@"
