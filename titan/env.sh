# What the wrappers in this folder share: device, defaults, guards, launch. They set family, config,
# tutorial and debug, source this file and call launch "$@".
#
#   DEVICE                  neuron, cuda or cpu (default: neuron where neuron-ls is, cuda where nvidia-smi is)
#   NGPU                    ranks (default: 64 on neuron, elsewhere 4)
#   MODULE, CONFIG          recipe module, by its full path, and recipe
#   STEPS                   training steps (default: the wrapper's)
#   TORCHTITAN_NEURON_DIR   torchtitan-neuron checkout, on neuron
#   HF_TOKEN                Hugging Face token, for the gated Llama tokenizer
#   PYTHON, RESULTS         Python to run with; folder for logs (default: results)
set -eo pipefail

TITAN=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$TITAN")
NAME=$(basename "$0" .sh)
PATH=$PATH:/opt/aws/neuron/bin
if [ -z "$PYTHON" ]; then
    PYTHON=$ROOT/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi

refuse() {
    echo "error: $*" >&2
    exit 2
}

# value OPTION WORD...: the last value that the words give to an option, as --a.b v or --a.b=v, with - or _.
value() {
    local wanted=$1 word key next= found=
    shift
    for word in "$@"; do
        if [ -n "$next" ]; then found=$word next=; continue; fi
        key=${word%%=*}
        if [ "${key//-/_}" = "__$wanted" ]; then
            case $word in *=*) found=${word#*=} ;; *) next=1 ;; esac
        fi
    done
    printf %s "$found"
}

# show WORD...: a command over several lines, an option and its value on one.
show() {
    local word
    printf %s "$1"
    shift
    for word in "$@"; do
        case $word in
            -*|[A-Z]*=*|*/*.py|*/run_train.sh) printf ' \\\n  %s' "$(quote "$word")" ;;
            *) printf ' %s' "$(quote "$word")" ;;
        esac
    done
    printf '\n'
}

quote() {
    case $1 in
        ''|*[!A-Za-z0-9_./=:,+-]*) printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")" ;;
        *) printf %s "$1" ;;
    esac
}

# The cores that neuron-ls lists, counted; nothing if it does not tell.
count_cores() {
    neuron-ls -j 2>/dev/null | "$PYTHON" -c '
import json, sys
text = sys.stdin.read()
devices = json.loads(text[text.find("["):])
print(sum(len(d.get("neuroncore_ids") or range(d.get("nc_count") or 0)) for d in devices))' 2>/dev/null || true
}

check_arguments() {
    case $MODULE in
        *.*) ;;
        *) refuse "MODULE is '$MODULE', a short name, which resolves to upstream's recipes without SimpleFSDP:" \
            "give the full path, $default_module" ;;
    esac
    local mode tp
    mode=$(value compile.mode "$@")
    if [ -n "$mode" ] && [ "$mode" != jit ]; then
        refuse "--compile.mode is '$mode': SimpleFSDP on Neuron supports jit only, and the recipe sets it;" \
            "leave the option out"
    fi
    tp=$(value parallelism.tensor_parallel_degree "$@")
    if [ "$CONFIG" = simple_fsdp_llama3_8b ] && ! [ "${tp:-1}" -gt 1 ] 2>/dev/null; then
        refuse "selective Llama 3.1 8B without tensor parallelism (degree ${tp:-1}) runs out of memory on" \
            "24 GiB cores: take CONFIG=simple_fsdp_llama3_8b_fullac, or --parallelism.tensor_parallel_degree=4"
    fi
    case $NGPU in
        ''|*[!0-9]*|0) refuse "NGPU is '$NGPU': give a number of ranks, 1 or more" ;;
    esac
    case $STEPS in
        *[!0-9]*|0) refuse "STEPS is '$STEPS': give a number of steps, 1 or more" ;;
    esac
}

check_neuron_machine() {
    [ -n "$TORCHTITAN_NEURON_DIR" ] ||
        refuse "TORCHTITAN_NEURON_DIR is not set: give the torchtitan-neuron directory that you installed"
    [ -x "$TORCHTITAN_NEURON_DIR/run_train.sh" ] ||
        refuse "no run_train.sh in TORCHTITAN_NEURON_DIR, $TORCHTITAN_NEURON_DIR: give the torchtitan-neuron" \
            "directory that you installed"
    local assets available
    assets=$(value hf_assets_path "$@")
    if [ -z "$assets" ]; then # the recipe's own: Llama's is downloaded, DeepSeek's comes with the repository
        case $family in llama3) assets=./assets/hf/Llama-3.1-8B ;; *) assets=. ;; esac
    fi
    (cd "$TORCHTITAN_NEURON_DIR" && [ -d "$assets" ] && [ -n "$(ls -A "$assets")" ]) ||
        refuse "no tokenizer in $assets of $TORCHTITAN_NEURON_DIR: run titan/download_tokenizers.sh, or give" \
            "--hf_assets_path"
    available=$(count_cores)
    if [ -z "$available" ]; then
        refuse "neuron-ls -j lists no cores, so NGPU=$NGPU cannot be checked: see that the driver is loaded"
    elif [ "$available" != "$NGPU" ]; then
        refuse "NGPU is $NGPU, neuron-ls lists $available cores: a run of another number hangs at startup;" \
            "set NGPU=$available"
    fi
}

check_other_machine() {
    "$PYTHON" -c 'from importlib.metadata import version; version("torchtitan")' 2>/dev/null ||
        refuse "$PYTHON has no torchtitan: make titan-smoke installs it, or pip install -r requirements-titan.txt"
}

notes() {
    echo "note: attention is causal but does not mask document boundaries: tokens see earlier documents of"
    echo "note: their sequence. The warning that compile mode jit is deprecated is expected."
    echo "note: the first step traces and compiles, and takes far longer than the next."
    if [ "$DEVICE" = neuron ]; then
        echo "note: the Neuron stack caches what it compiled (TORCH_NEURONX_NEFF_CACHE_DIR): later runs start faster."
        case " ${tutorial[*]} " in
            *" --training.steps "*) ;;
            *) echo "note: this is a full training run, and the instance bills: stop it with Ctrl-C." ;;
        esac
    fi
}

# neuron_command WORD...: set command to the tutorial's, with more options.
neuron_command() {
    MODULE=${chosen_module:-torchtitan_neuron.experiments.graph_trainer.$family}
    CONFIG=${chosen_config:-$config}
    NGPU=${chosen_ngpu:-64}
    default_module=torchtitan_neuron.experiments.graph_trainer.$family
    options=("${tutorial[@]}" "$@")
    command=("NGPU=$NGPU" "MODULE=$MODULE" "CONFIG=$CONFIG" ./run_train.sh "${options[@]}")
}

# other_command WORD...: set command to the same recipe at debug size, by this repository's titan/train.py.
other_command() {
    local debug_config=${config/8b/debugmodel}
    MODULE=${chosen_module:-titan.$family}
    CONFIG=${chosen_config:-${debug_config/16b_nki_tp4_fsdp16/debugmodel_tp2}}
    NGPU=${chosen_ngpu:-4}
    default_module=titan.$family
    options=(--hf_assets_path .titan/tokenizer)
    if [ -z "$(value dataloader.dataset "$@")" ]; then
        options+=(--dataloader.dataset c4_test --dataloader.dataset_path .titan/c4_test)
    fi
    options+=(--dump_folder "$results/$NAME" "${debug[@]}" ${STEPS:+--training.steps "$STEPS"} "$@")
    command=("$PYTHON" launch.py --standalone "--nproc-per-node=$NGPU" --log-dir "$results/logs/$NAME"
        --redirects 3 --tee 1 --local-ranks-filter 0
        titan/train.py --module "$MODULE" --config "$CONFIG" "${options[@]}")
}

# launch WORD...: run the wrapper's recipe on this machine, or with --dry-run say how.
launch() {
    local dry= given=$DEVICE word status=0 words=()
    for word in "$@"; do
        if [ "$word" = --dry-run ]; then dry=1; else words+=("$word"); fi
    done
    chosen_module=$MODULE chosen_config=$CONFIG chosen_ngpu=$NGPU
    results=${RESULTS:-results}/titan
    if [ -z "$DEVICE" ]; then
        if command -v neuron-ls >/dev/null; then DEVICE=neuron
        elif command -v nvidia-smi >/dev/null; then DEVICE=cuda
        else DEVICE=cpu; fi
    fi
    case $DEVICE in
        neuron) neuron_command "${words[@]}" ;;
        cpu|cuda) other_command "${words[@]}" ;;
        *) refuse "DEVICE is '$DEVICE': neuron, cuda or cpu" ;;
    esac
    check_arguments "${options[@]}"

    if [ -n "$dry" ] && [ -z "$given" ] && [ "$DEVICE" != neuron ]; then
        echo "# here, on the ${DEVICE}, at debug size:"
        show "${command[@]}"
        neuron_command "${words[@]}"
        check_arguments "${options[@]}"
        echo "# on a Neuron node, in the torchtitan-neuron directory:"
    fi
    if [ -n "$dry" ]; then
        show "${command[@]}"
        return
    fi

    if [ "$DEVICE" = neuron ]; then
        check_neuron_machine "${options[@]}"
    else
        check_other_machine
    fi
    cd "$ROOT"
    mkdir -p "$results"
    local log=$PWD/$results/$NAME.log monitor=
    case $results in /*) log=$results/$NAME.log ;; esac
    rm -f "$log" "$log.neuron-monitor"
    notes >&2
    if [ "$DEVICE" = neuron ]; then
        if command -v neuron-monitor >/dev/null; then
            neuron-monitor >"$log.neuron-monitor" 2>/dev/null &
            monitor=$!
        fi
        echo "== $NAME: $NGPU NeuronCores; log in $log" >&2
        (cd "$TORCHTITAN_NEURON_DIR" && env "${command[@]}") 2>&1 | tee -i "$log" || status=$?
        [ -z "$monitor" ] || kill "$monitor" 2>/dev/null || true
    else
        "$PYTHON" titan/make_assets.py --output .titan
        if [ "$DEVICE" = cpu ]; then export CUDA_VISIBLE_DEVICES=; fi
        export HF_DATASETS_CACHE=$ROOT/.titan/cache OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
        echo "== $NAME: $CONFIG on $NGPU ranks of the $DEVICE, not on Neuron; log in $log" >&2
        rm -rf "$results/logs/$NAME"
        "${command[@]}" 2>&1 | tee -i "$log" || status=$?
    fi
    "$PYTHON" "$TITAN/check_run.py" "$log" || [ "$status" != 0 ] || status=$?
    return "$status"
}
