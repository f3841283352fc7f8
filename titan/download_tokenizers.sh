#!/usr/bin/env bash
# Step 3: download the tokenizers into ./assets/hf of the torchtitan-neuron directory.
#
#   titan/download_tokenizers.sh [--dry-run] [llama] [deepseek]     default: both
#
#   HF_TOKEN                token of an account with access to Llama's repository, which is gated
#   TORCHTITAN_NEURON_DIR   the torchtitan-neuron directory
source "$(dirname "$0")/launch.sh" || exit 2

dry= which=()
for word in "$@"; do
    case $word in
        --dry-run) dry=1 ;;
        -h|--help) usage ;;
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
    local status=0
    "$python" scripts/download_hf_assets.py --repo_id "$repository" --assets tokenizer "$@" 2>&1 |
        tee "$said" || status=$?
    if [ "$status" != 0 ]; then
        echo "error: the download of $repository failed: $(reason)" >&2
        exit 1
    fi
    has_tokenizer "$folder" || {
        echo "error: the download of $repository matched no tokenizer file: there is none in $PWD/$folder" >&2
        exit 1
    }
}

# reason: why a download failed, by what it said. The Hub answers 401 or 403 where a token does not do.
reason() {
    if grep -qE '40[13] Client Error|GatedRepo|restricted|Unauthorized|Forbidden' "$said"; then
        echo "pass a valid HF_TOKEN, and see that your account has been granted access"
    elif grep -qE 'ConnectionError|ConnectError|ConnectTimeout|ReadTimeout|Max retries|resolve|unreachable' "$said"; then
        echo "the Hugging Face Hub cannot be reached; see to the network, or to HTTPS_PROXY"
    else
        echo "its messages are above"
    fi
}

HF_TOKEN=${HF_TOKEN//[[:space:]]/}
said=$(mktemp)
trap 'rm -f "$said"' EXIT
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
