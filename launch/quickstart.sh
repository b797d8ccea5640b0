#!/usr/bin/env bash
# From a fresh clone to a trained, stopped, resumed and verified model; see usage below.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: bash launch/quickstart.sh [OPTIONS]

Makes .venv, installs tdp_megatron, builds a corpus from text this machine has, trains a tokenizer, preprocesses,
trains a small GPT under torchrun, stops, resumes on another number of ranks, and proves that no sample was lost
or repeated. Ends with a table, also written to OUTPUT/summary.json.

  --world-size N          ranks of the first run (default: DP x CP)
  --dp N                  data-parallel size (default: 2, or WORLD_SIZE / CP)
  --cp N                  context-parallel size (default: 2)
  --steps N               steps of the first run (default: 30)
  --resume-dp N           data-parallel size after the resume (default: half of DP, at least 1)
  --resume-cp N           context-parallel size after the resume (default: CP; half of it if DP is 1)
  --resume-steps N        steps after the resume (default: 10)
  --data PATH             own data instead of the corpus, repeatable: a .jsonl file, a folder of text, or the prefix
                          of .bin/.idx files (then give --tokenizer too)
  --weights "W W ..."     share of each dataset in the blend (default: 0.7 0.3 for the corpus, else equal)
  --tokenizer FILE        a tokenizer.json (default: trained on the corpus)
  --global-batch-size N   samples per step (default: 32)
  --max-seqlen N          longer documents are split, tokens (default: 512)
  --algorithm NAME        packing algorithm, auto or one of those in docs/scheduler.md (default: lpt)
  --reroute plan|exchange how samples reach their ranks (default: plan)
  --device auto|cpu|cuda  (default: auto)
  --live                  keep tables of what the data nodes do on the screen (in a terminal)
  --output DIR            (default: out/quickstart in the repository)
  -h, --help              this text

PYTHON names the interpreter for .venv (default: python3).
EOF
}

wrong() {
    echo "error: $1" >&2
    echo "see bash launch/quickstart.sh --help" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
world_size='' dp='' cp='' steps=30 resume_dp='' resume_cp='' resume_steps=10
data=() weights='' tokenizer='' global_batch_size=32 max_seqlen=512
algorithms='auto balanced_hybrid_cp best_fit buddy default_dynamic_cp dp_balanced kk lpt stream waves'
algorithm=lpt reroute=plan device=auto output=$root/out/quickstart live=()

absolute() {
    case $1 in
        /*) printf '%s\n' "$1" ;;
        *) printf '%s\n' "$PWD/$1" ;;
    esac
}

while (($#)); do
    option=$1
    case $option in
        -h | --help)
            usage
            exit 0
            ;;
        --live)
            live=(--live)
            shift
            continue
            ;;
        --*=*)
            set -- "${option%%=*}" "${option#*=}" "${@:2}"
            continue
            ;;
        --world-size | --dp | --cp | --steps | --resume-dp | --resume-cp | --resume-steps | --global-batch-size | --max-seqlen)
            [[ ${2-} =~ ^[1-9][0-9]{0,8}$ ]] || wrong "$option needs a whole number above 0, got '${2-}'"
            name=${option#--}
            printf -v "${name//-/_}" '%s' "$2"
            ;;
        --data)
            [[ -n ${2-} ]] || wrong "--data needs a path"
            [[ -e $2 || -e $2.idx ]] || wrong "--data $2: there is no such file or folder, nor $2.idx"
            data+=("$(absolute "$2")")
            ;;
        --tokenizer)
            [[ -f ${2-} ]] || wrong "--tokenizer needs a tokenizer.json, got '${2-}'"
            tokenizer=$(absolute "$2")
            ;;
        --weights)
            [[ -n ${2-} ]] || wrong "--weights needs numbers, as in --weights '0.7 0.3'"
            weights=$2
            ;;
        --reroute)
            [[ ${2-} == plan || ${2-} == exchange ]] || wrong "--reroute is plan or exchange, got '${2-}'"
            reroute=$2
            ;;
        --device)
            [[ ${2-} == auto || ${2-} == cpu || ${2-} == cuda ]] || wrong "--device is auto, cpu or cuda, got '${2-}'"
            device=$2
            ;;
        --algorithm)
            [[ ${2-} =~ ^[a-z_]+$ && " $algorithms " == *" $2 "* ]] || wrong "--algorithm is one of ${algorithms// /, }; got '${2-}'"
            algorithm=$2
            ;;
        --output)
            [[ -n ${2-} ]] || wrong "--output needs a folder"
            output=$(absolute "$2")
            ;;
        *)
            wrong "unknown option '$option'"
            ;;
    esac
    shift 2
done

if [[ -z $cp ]]; then
    cp=2
    if [[ -n $world_size && -n $dp ]]; then
        cp=$((world_size / dp ? world_size / dp : 1))
    elif [[ -n $world_size ]] && ((world_size % 2)); then
        cp=1
    fi
fi
if [[ -z $dp ]]; then
    dp=2
    if [[ -n $world_size ]]; then
        dp=$((world_size / cp ? world_size / cp : 1))
    fi
fi
world_size=${world_size:-$((dp * cp))}
((dp * cp == world_size)) || wrong "--dp $dp x --cp $cp is $((dp * cp)) ranks, but --world-size is $world_size"
if ((dp > 1)); then
    resume_dp=${resume_dp:-$((dp / 2))} resume_cp=${resume_cp:-$cp}
elif ((cp > 1)); then
    resume_dp=${resume_dp:-1} resume_cp=${resume_cp:-$((cp / 2))}
else
    resume_dp=${resume_dp:-2} resume_cp=${resume_cp:-1}
fi
read -r -a weight_list <<<"$weights"
sources=$((${#data[@]} ? ${#data[@]} : 2))
if ((${#weight_list[@]} && ${#weight_list[@]} != sources)); then
    wrong "--weights has ${#weight_list[@]} numbers for $sources datasets"
fi
for weight in ${weight_list[@]+"${weight_list[@]}"}; do
    [[ $weight =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$ ]] || wrong "--weights: '$weight' is no number from 0 up"
done

for path in ${data[@]+"${data[@]}"}; do
    if [[ -e $path.idx && -z $tokenizer ]]; then
        wrong "--data $path is tokenized already: give --tokenizer too, so that the vocabulary size is known"
    fi
done

plural() {
    if (($1 == 1)); then printf '1 rank'; else printf '%s ranks' "$1"; fi
}

# Children run in groups of their own, so that ending the script ends all of them.
set -m
child='' training=''
run() {
    "$@" &
    child=$!
    local status=0
    wait "$child" || status=$?
    child=''
    return "$status"
}
stop() {
    trap '' TERM HUP
    trap 'kill -TERM -- "-$child"; exit 130' INT
    if [[ -n $child ]]; then
        # torchrun would answer a signal with a traceback. Its ranks save and end in peace, and then so does it.
        if [[ -z $training ]] || ! pkill -TERM -P "$child" 2>/dev/null; then
            kill -TERM -- "-$child" 2>/dev/null || true
        fi
        wait "$child" 2>/dev/null || true
    fi
    echo "quickstart: stopped" >&2
    exit "$1"
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM

stage() {
    printf '\n== %s (%d s)\n' "$1" "$SECONDS"
}

# shellcheck source=launch/install.sh
source "$root/launch/install.sh"
stage "Install"
run install_tdp "$root" || exit
VENV_BIN=$root/.venv/bin
SECONDS=0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

stage "Corpus and tokenizer"
mkdir -p "$output/data"
if ((${#data[@]} == 0)) || [[ -z $tokenizer ]]; then
    run "$VENV_BIN/python" "$root/launch/corpus.py" --output-dir "$output/corpus"
fi
if ((${#data[@]} == 0)); then
    data=("$output/corpus/code.jsonl" "$output/corpus/prose.jsonl")
    ((${#weight_list[@]})) || weight_list=(0.7 0.3)
fi

stage "Preprocess"
data_options=()
for number in "${!data[@]}"; do
    source_path=${data[number]}
    if [[ -e $source_path.idx ]]; then
        data_options+=(--data "$source_path")
        continue
    fi
    name=$(basename "$source_path" .jsonl)
    prefix=$output/data/$number-$name
    run "$VENV_BIN/tdp" preprocess --input "$source_path" --output-prefix "$prefix" \
        --tokenizer "${tokenizer:-$output/corpus/tokenizer.json}" --append-eod --workers 2
    data_options+=(--data "${prefix}_text_document")
done
if ((${#weight_list[@]})); then
    data_options+=(--weights "${weight_list[@]}")
fi

train() {
    local dp=$1 cp=$2
    shift 2
    training=yes
    run "$VENV_BIN/torchrun" --standalone --nproc-per-node "$((dp * cp))" "$root/launch/train_gpt.py" \
        "${data_options[@]}" --tokenizer "${tokenizer:-$output/corpus/tokenizer.json}" \
        --dp "$dp" --cp "$cp" --global-batch-size "$global_batch_size" --max-seqlen "$max_seqlen" \
        --algorithm "$algorithm" --reroute "$reroute" --device "$device" --num-layers 2 \
        --steps "$((steps + resume_steps))" --output "$output/run" ${live[@]+"${live[@]}"} "$@"
    training=''
}

# The stop comes in the middle of training, with further steps read ahead, as a preempted job would stop.
stage "Train $steps steps on $(plural "$world_size"): DP $dp x CP $cp"
rm -rf "$output/run"
train "$dp" "$cp" --exit-interval "$steps" --save-interval 10 --resume none

stage "Resume for $resume_steps steps on $(plural "$((resume_dp * resume_cp))"): DP $resume_dp x CP $resume_cp"
train "$resume_dp" "$resume_cp"

stage "Verify"
run "$VENV_BIN/python" "$root/launch/verify_resume.py" --run "$output/run" --summary "$output/summary.json"
echo "quickstart: done in $SECONDS s after the installs"
