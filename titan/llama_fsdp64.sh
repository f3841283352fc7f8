#!/usr/bin/env bash
# Step 1: Llama 3.1 8B, full activation checkpointing, TP1 x FSDP64: ten steps on the bundled c4_test.
#
#   titan/llama_fsdp64.sh [--dry-run] [options of torchtitan.train]
family=llama3
config=simple_fsdp_llama3_8b_fullac
tutorial=(--training.steps "${STEPS:-10}" --dataloader.dataset c4_test --hf_assets_path=./tests/assets/tokenizer)
debug=()
source "$(dirname "$0")/launch.sh" || exit 2
launch "$@"
