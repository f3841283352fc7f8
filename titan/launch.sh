# What the wrappers in this folder share: device, defaults, guards, launch. They set family, config,
# tutorial and debug, source this file and call launch "$@".
#
#   DEVICE                  neuron, cuda or cpu (default: neuron where neuron-ls is, cuda where nvidia-smi is)
#   NGPU                    ranks (default: 64 on neuron, elsewhere 4)
#   MODULE, CONFIG          recipe module, by its full path, and recipe
#   STEPS                   training steps (default: the wrapper's)
#   TORCHTITAN_NEURON_DIR   torchtitan-neuron checkout, on neuron
#   RECORD                  folder in which record_training.py records the first three steps (default: none)
#   HF_TOKEN                Hugging Face token, for the gated Llama tokenizer
#   PYTHON, RESULTS         Python to run with; folder for logs (default: results)
set -eo pipefail
unset CDPATH

TITAN=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$TITAN")
NAME=$(basename "$0" .sh)
PATH=$PATH:/opt/aws/neuron/bin
[ -n "$PYTHON" ] || PYTHON=$ROOT/.venv/bin/python
[ -x "$(command -v "$PYTHON")" ] || PYTHON=python3

# usage: print the script's first comment, and the variables that the wrappers read: the comment above.
usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    if [ -n "$config" ]; then
        printf '\nVariables:\n'
        sed -n '/^#   DEVICE/,/^[^#]/s/^#   /    /p' "$TITAN/launch.sh"
    fi
    exit
}

refuse() {
    echo "error: $*" >&2
    exit 2
}

# absolute PATH: print the path so that it holds in any directory; an empty one stays empty.
absolute() {
    case $1 in ''|/*) printf %s "$1" ;; *) printf %s "$PWD/$1" ;; esac
}
TORCHTITAN_NEURON_DIR=$(absolute "$TORCHTITAN_NEURON_DIR")
RECORD=$(absolute "$RECORD")
case $PYTHON in */*) PYTHON=$(absolute "$PYTHON") ;; esac

# find_option OPTION WORD...: whether --OPTION is among the words. Its last value is then in found.
# Both --a.b v and --a.b=v count, with - or _ in the name.
find_option() {
    local wanted=__$1 word key next= seen=
    found=
    shift
    for word in "$@"; do
        if [ -n "$next" ]; then found=$word next=; continue; fi
        key=${word%%=*}
        if [ "${key//-/_}" = "$wanted" ]; then
            seen=1
            case $word in *=*) found=${word#*=} ;; *) found= next=1 ;; esac
        fi
    done
    [ -n "$seen" ]
}

# show WORD...: print a command that can be pasted, each option with its value on a line of its own.
show() {
    local word first=1
    for word in "$@"; do
        case $word in
            -*|[A-Z]*=*|*/*.py|*/run|*/run_train.sh) [ -n "$first" ] || printf ' \\\n  ' ;;
            *) [ -n "$first" ] || printf ' ' ;;
        esac
        first=
        case $word in
            [A-Z]*=*) printf %s= "${word%%=*}" && quote "${word#*=}" ;;
            *) quote "$word" ;;
        esac
    done
    printf '\n'
}

# quote WORD: print a word as the shell reads it, in quotes if it needs them.
quote() {
    case $1 in
        ''|*[!A-Za-z0-9_./=:,+-]*) printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")" ;;
        *) printf %s "$1" ;;
    esac
}

check_arguments() {
    local option
    for option in module config; do
        if find_option $option "$@"; then
            refuse "--$option is '$found': set it as $(echo $option | tr a-z A-Z)=$found, which is checked"
        fi
    done
    case $MODULE in
        *.*) ;;
        *) refuse "MODULE is '$MODULE', a short name, which resolves to upstream's recipes without SimpleFSDP:" \
            "give the full path, $default_module" ;;
    esac
    if find_option compile.mode "$@" && [ "$found" != jit ]; then
        refuse "--compile.mode is '$found': SimpleFSDP on Neuron supports jit only, and the recipe sets it;" \
            "leave the option out"
    fi
    find_option parallelism.tensor_parallel_degree "$@" || found=1
    case $found in
        ''|*[!0-9]*) refuse "--parallelism.tensor_parallel_degree is '$found': give a number" ;;
    esac
    if [ "$DEVICE" = neuron ] && [ "$CONFIG" = simple_fsdp_llama3_8b ] && [ "$found" -lt 2 ]; then
        refuse "selective Llama 3.1 8B without tensor parallelism (degree $found) runs out of memory on" \
            "24 GiB cores: take CONFIG=simple_fsdp_llama3_8b_fullac, or --parallelism.tensor_parallel_degree=4"
    fi
    check_count NGPU "$NGPU" ranks
    check_count STEPS "${STEPS:-1}" steps
}

# check_count NAME VALUE THINGS: refuse a variable that is no number from 1 on.
check_count() {
    case $2 in
        ''|*[!0-9]*) ;;
        *) [ "$2" -eq 0 ] || return 0 ;;
    esac
    refuse "$1 is '$2': give a number of $3, 1 or more"
}

# has_tokenizer FOLDER: whether there is a tokenizer in it, as TorchTitan reads them.
has_tokenizer() {
    [ -s "$1/tokenizer.json" ] || [ -s "$1/tokenizer.model" ] || [ -s "$1/vocab.json" ] || [ -s "$1/vocab.txt" ]
}

check_neuron_machine() {
    [ -n "$TORCHTITAN_NEURON_DIR" ] ||
        refuse "TORCHTITAN_NEURON_DIR is not set: give the torchtitan-neuron directory that you installed"
    [ -f "$TORCHTITAN_NEURON_DIR/run_train.sh" ] ||
        refuse "no run_train.sh in TORCHTITAN_NEURON_DIR, $TORCHTITAN_NEURON_DIR: give the torchtitan-neuron" \
            "directory that you installed"
    [ -x "$TORCHTITAN_NEURON_DIR/run_train.sh" ] ||
        refuse "$TORCHTITAN_NEURON_DIR/run_train.sh may not be executed: chmod +x it"
    local available
    if ! find_option hf_assets_path "$@"; then # the recipe's own; DeepSeek's comes with the repository
        case $CONFIG in simple_fsdp_llama3_8b*) found=./assets/hf/Llama-3.1-8B ;; esac
    fi
    [ -z "$found" ] || (cd "$TORCHTITAN_NEURON_DIR" && has_tokenizer "$found") ||
        refuse "no tokenizer in $found of $TORCHTITAN_NEURON_DIR: run titan/download_tokenizers.sh, or give" \
            "--hf_assets_path"
    available=$("$PYTHON" "$ROOT/preflight.py" --cores 2>&1 | tail -n 1) ||
        refuse "NGPU=$NGPU cannot be checked: ${available#error: }"
    [ "$available" = "$NGPU" ] ||
        refuse "NGPU is $NGPU, neuron-ls lists $available cores: a run of another number hangs at startup;" \
            "set NGPU=$available"
}

check_other_machine() {
    "$PYTHON" -c 'from importlib.metadata import version; version("torchtitan")' 2>/dev/null ||
        refuse "$PYTHON has no torchtitan: $PYTHON -m pip install -r $ROOT/requirements-titan.txt"
}

notes() {
    echo "note: attention is causal but does not mask document boundaries: tokens see earlier documents of"
    echo "note: their sequence. The warning that compile mode jit is deprecated is expected."
    echo "note: the first step traces and compiles, and takes far longer than the next."
    if [ "$DEVICE" = neuron ]; then
        echo "note: the Neuron stack caches what it compiled (TORCH_NEURONX_NEFF_CACHE_DIR): later runs start faster."
    fi
    if find_option training.steps "$@" || [ "$DEVICE" != neuron ]; then
        echo "note: a few steps on a small text show that the path works, and train nothing."
    else
        echo "note: this is a full training run, and the instance bills: stop it with Ctrl-C."
    fi
}

# neuron_command WORD...: set command to the tutorial's, with more options.
neuron_command() {
    DEVICE=neuron
    default_module=torchtitan_neuron.experiments.graph_trainer.$family
    MODULE=${chosen_module:-$default_module}
    CONFIG=${chosen_config:-$config}
    NGPU=${chosen_ngpu:-64}
    options=("${tutorial[@]}" "$@")
    local record=()
    if [ -n "$RECORD" ]; then
        record=("RECORD=$RECORD" "RECORD_STEPS=$(steps_to_record "${options[@]}")" "$TITAN/record/run")
    fi
    command=("NGPU=$NGPU" "MODULE=$MODULE" "CONFIG=$CONFIG" "${record[@]}" ./run_train.sh "${options[@]}")
}

# steps_to_record WORD...: three, or as many as the options train.
steps_to_record() {
    find_option training.steps "$@" || found=3
    case $found in 1|2) echo "$found" ;; *) echo 3 ;; esac
}

# other_command WORD...: set command to the same recipe at debug size, by this repository's titan/train.py.
other_command() {
    local debug_config=${config/8b/debugmodel}
    default_module=titan.$family
    MODULE=${chosen_module:-$default_module}
    CONFIG=${chosen_config:-${debug_config/16b_nki_tp4_fsdp16/debugmodel_tp2}}
    NGPU=${chosen_ngpu:-4}
    options=(--hf_assets_path .titan/tokenizer)
    find_option dataloader.dataset "$@" || options+=(--dataloader.dataset c4_test)
    if [ "${found:-c4_test}" = c4_test ]; then # other data are where TorchTitan looks for them
        options+=(--dataloader.dataset_path .titan/c4_test)
    fi
    options+=(--dump_folder "$results/$NAME" "${debug[@]}" ${STEPS:+--training.steps "$STEPS"} "$@")
    local record=()
    if [ -n "$RECORD" ]; then
        record=("$ROOT/record_training.py" --output-dir "$RECORD" --steps "$(steps_to_record "${options[@]}")"
            --afterwards continue)
    fi
    command=("TITAN_DEVICE=$DEVICE" OMP_NUM_THREADS=1 HF_DATASETS_CACHE=.titan/cache
        "$PYTHON" launch.py --standalone "--nproc-per-node=$NGPU" --log-dir "$results/logs/$NAME"
        --redirects 3 --tee 1 --local-ranks-filter 0
        "${record[@]}" titan/train.py --module "$MODULE" --config "$CONFIG" "${options[@]}")
}

# launch WORD...: run the wrapper's recipe on this machine, or with --dry-run say how.
launch() {
    local dry= given=$DEVICE word words=()
    for word in "$@"; do
        case $word in
            --dry-run) dry=1 ;;
            -h|--help) usage ;;
            *) words+=("$word") ;;
        esac
    done
    chosen_module=$MODULE chosen_config=$CONFIG chosen_ngpu=$NGPU
    results=${RESULTS:-results}/titan
    if [ -z "$DEVICE" ]; then
        if command -v neuron-ls >/dev/null; then DEVICE=neuron
        elif command -v nvidia-smi >/dev/null; then DEVICE=cuda
        else DEVICE=cpu; fi
    fi
    case $DEVICE in
        neuron) neuron_command "${words[@]}"; check_arguments "${words[@]}" "${options[@]}" ;;
        cpu|cuda) other_command "${words[@]}"; check_arguments "${words[@]}" ;;
        *) refuse "DEVICE is '$DEVICE': neuron, cuda or cpu" ;;
    esac
    if [ -z "$dry" ]; then
        train
        return
    fi
    if [ -z "$given$chosen_module$chosen_config$chosen_ngpu" ] && [ "$DEVICE" != neuron ]; then
        echo "# here, on the ${DEVICE}, at debug size:"
        show_here
        neuron_command "${words[@]}"
        check_arguments "${options[@]}"
        echo "# on a Neuron node, in the torchtitan-neuron directory:"
    fi
    if [ "$DEVICE" = neuron ]; then show "${command[@]}"; else show_here; fi
}

# show_here: print the command and what it needs, so that both can be pasted in any folder.
show_here() {
    printf 'cd ' && quote "$ROOT" && echo
    show "$PYTHON" titan/make_assets.py --output .titan
    show "${command[@]}"
}

# take_folder FOLDER: refuse one in which another run is on. The kernel releases it when this run has ended.
take_folder() {
    mkdir -p "$1" "$results" 2>/dev/null && [ -w "$1" ] && [ -w "$results" ] ||
        refuse "RESULTS is '$1', which cannot be written: set another folder"
    exec 9<>"$1/in-use.txt"
    if command -v flock >/dev/null && ! flock -n 9; then
        refuse "$1 is in use: $(cat "$1/in-use.txt"); wait for it, or set another RESULTS"
    fi
    echo "process $$, $NAME, started $(date '+%Y-%m-%d %H:%M:%S')" >"$1/in-use.txt"
}

# all_below PID: print the process and those that it and its children started.
all_below() {
    ps -eo pid=,ppid= | awk -v root="$1" '
        { parent[$1] = $2 }
        END { for (pid in parent) for (up = pid; up > 1; up = parent[up]) if (up == root) { print pid; break } }'
}

# stop SIGNAL: end the command and all that it started, within ten seconds.
stop() {
    local all running
    trap '' INT TERM HUP
    stopped=--stopped
    all=$(all_below "$job")
    echo "== $NAME: stopped by SIG$1, ending $(echo "$all" | wc -l) processes" >&2
    kill -TERM -- "-$job" 2>/dev/null
    for _ in $(seq 95); do # longer than launch.py takes for its own ranks: STOP_SECONDS
        running=$(ps -o pid= -p "$(echo $all | tr ' ' ,)" 2>/dev/null) || return 0
        sleep 0.1
    done
    kill -KILL $running 2>/dev/null || true
}

# train: check the machine, run the command, check the run's log.
train() {
    if [ "$DEVICE" = neuron ]; then check_neuron_machine "${options[@]}"; else check_other_machine; fi

    cd "$ROOT"
    take_folder "${RESULTS:-results}"
    local log status=0 checked=0 stopped= folder=$ROOT job
    until log=$(absolute "$results/$NAME-$(date +%Y%m%d-%H%M%S).log") && [ ! -e "$log" ]; do sleep 0.2; done
    ln -sf "$(basename "$log")" "$results/$NAME.log" # the latest
    rm -f ${RECORD:+"$RECORD/rank-0.pt"}
    notes "${options[@]}" >&2
    if [ "$DEVICE" = neuron ]; then
        folder=$TORCHTITAN_NEURON_DIR
        if command -v neuron-monitor >/dev/null; then
            neuron-monitor >"$log.neuron-monitor" 2>/dev/null 9>&- &
            trap "kill $! 2>/dev/null || true" EXIT
        fi
        unset NEURON_RT_VISIBLE_CORES NEURON_RT_NUM_CORES # every rank takes its own of all cores
        echo "== $NAME: $NGPU NeuronCores; log in $log" >&2
    else
        "$PYTHON" titan/make_assets.py --output .titan
        rm -rf "$results/logs/$NAME"
        echo "== $NAME: $CONFIG on $NGPU ranks of the $DEVICE, not on Neuron; log in $log" >&2
    fi
    set -m # what runs in the background now is a process group of its own, which can be ended as a whole
    { (cd "$folder" && exec env "${command[@]}") 2>&1 | (trap '' INT TERM && exec tee "$log"); exit "${PIPESTATUS[0]}"; } &
    job=$!
    set +m
    trap 'stop INT' INT
    trap 'stop TERM' TERM HUP
    wait "$job" || status=$?
    trap - INT TERM HUP
    "$PYTHON" "$TITAN/check_run.py" "$log" $stopped || checked=$?
    [ "$status" != 0 ] || status=$checked
    if [ -n "$RECORD" ] && [ "$status" = 0 ] && [ ! -e "$RECORD/rank-0.pt" ]; then
        refuse "nothing was recorded in $RECORD: run_train.sh has not started torchrun with a module or a script"
    fi
    return "$status"
}
