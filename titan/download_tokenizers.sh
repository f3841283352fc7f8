#!/usr/bin/env bash
# Step 3: download the tokenizers into ./assets/hf of the torchtitan-neuron directory.
#
#   titan/download_tokenizers.sh [--dry-run] [llama] [deepseek]     default: both
#
# Llama's repository is gated: HF_TOKEN has to hold a token of an account that was granted access.
source "$(dirname "$0")/launch.sh" || exit 2

dry= which=()
for word in "$@"; do
    case $word in
        --dry-run) dry=1 ;;
        llama|deepseek) which+=("$word") ;;
        *) refuse "'$word' is unknown: --dry-run, llama or deepseek" ;;
    esac
done
[ ${#which[@]} -gt 0 ] || which=(llama deepseek)

python=$(command -v python || command -v python3) # the one that torchtitan-neuron is installed in

# download REPOSITORY WORD...: one download; it failed if it brought no tokenizer.
download() {
    local repository=$1 folder=assets/hf/${1##*/}
    shift
    if has_tokenizer "$folder"; then
        echo "== $repository: a tokenizer is in $PWD/$folder already"
        return
    fi
    "$python" scripts/download_hf_assets.py --repo_id "$repository" --assets tokenizer "$@" || {
        echo "error: the download of $repository failed: pass a valid HF_TOKEN if it is gated, and see that" \
            "your account has been granted access" >&2
        exit 1
    }
    has_tokenizer "$folder" || {
        echo "error: the download of $repository matched no tokenizer file: there is none in $PWD/$folder" >&2
        exit 1
    }
}

HF_TOKEN=${HF_TOKEN//[[:space:]]/}
for repository in "${which[@]}"; do
    if [ "$repository" = llama ] && [ -z "$dry" ] && [ -z "$HF_TOKEN" ]; then
        refuse "HF_TOKEN is not set, and meta-llama/Llama-3.1-8B is gated: set it to a token of an account with" \
            "access; DeepSeek needs none: titan/download_tokenizers.sh deepseek"
    fi
done
if [ -z "$dry" ]; then
    [ -n "$TORCHTITAN_NEURON_DIR" ] ||
        refuse "TORCHTITAN_NEURON_DIR is not set: give the torchtitan-neuron directory that you installed"
    cd "$TORCHTITAN_NEURON_DIR" 2>/dev/null && [ -f scripts/download_hf_assets.py ] ||
        refuse "no scripts/download_hf_assets.py in TORCHTITAN_NEURON_DIR, $TORCHTITAN_NEURON_DIR"
fi
for repository in "${which[@]}"; do
    case $repository in
        llama) words=(meta-llama/Llama-3.1-8B "--hf_token=$HF_TOKEN") shown='--hf_token="$HF_TOKEN"' ;;
        deepseek) words=(deepseek-ai/deepseek-moe-16b-base) shown= ;;
    esac
    if [ -n "$dry" ]; then # the token itself is never printed
        echo "python scripts/download_hf_assets.py \\"
        echo "  --repo_id ${words[0]} --assets tokenizer${shown:+ $shown}"
    else
        download "${words[@]}"
    fi
done
