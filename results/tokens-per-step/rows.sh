#!/usr/bin/env bash
# Rows of results/log/tokens-per-step.md, one after the other, on the GPUs that CUDA_VISIBLE_DEVICES shows:
#
#   results/tokens-per-step/rows.sh parted-linear parted-1m ...
#
# A row that was stopped goes on where it was, a finished one is a matter of seconds. SEEDS is the number of seeds (3; more
# are added to a finished row), SEED the first of them (1), BAND the number of them for which 16 bits leave a parting once
# more, a rounding apart (2), RUNS the number of runs at a time on each GPU (3), TIME_LIMIT the seconds after which a row
# saves its runs and stops.
# Rows with a ladder or with capped gains (paper-end16, paper-edges, paper-measured, *-capped) need commit 75f1db79 or an earlier one,
# those with gradients of weights in 16 bits (*-wgrad16) 97813d0a or an earlier one, those with Q-smoothing e58c3622 or an earlier one.
set -euo pipefail
cd "$(dirname "$0")/../.."

probe=stability.quant_noise.every_steps=100
paper="paper: attention.backend=sage attention.recipe=paper $probe"
capped="paper-capped: attention.backend=sage attention.recipe=paper stability.qk_gain.cap=1.25 $probe"
sdpa_capped='sdpa-capped: stability.qk_gain.cap=1.25'
ladder='stability.precision={rungs: [sdpa], floors: [{rung: sdpa, last_fraction: 0.1}]}'
paper_end="paper-end16: attention.backend=sage attention.recipe=paper $ladder $probe"
edges='stability.precision={rungs: [sdpa], floors: [{rung: sdpa, first_layers: 1, last_layers: 1}]}'
paper_edges="paper-edges16: attention.backend=sage attention.recipe=paper $edges $probe"
measured='stability.precision={rungs: [scores, sdpa], threshold: {metric: quant_noise/*/bias_to_gradient, above: 0.002}}'
paper_ladder="paper-ladder: attention.backend=sage attention.recipe=paper $measured $probe"
aware='tokens_per_step={schedule: noise_aware, start: 131072, floor: 16384, ceiling: 1048576, hold_tokens: 2097152, margin: 0.01}'
paper_aware="paper-aware: attention.backend=sage attention.recipe=paper stability.quant_noise.every_steps=10 $aware"
no_smoothing="no-k-smoothing: attention.backend=sage attention.recipe=paper attention.smooth_k=false $probe"
q_smoothing="q-smoothing: attention.backend=sage attention.recipe=paper attention.smooth_q=true $probe"
fine="fine: attention.backend=sage attention.recipe=fine $probe"
int8_attention="attention.backend=sage attention.recipe=scores $probe"
scores="scores: $int8_attention"
fp8="fp8: $int8_attention linear.precision=fp8"
fp8_alone="fp8-alone: linear.precision=fp8 $probe"
fp8_end="fp8-end16: linear.precision=fp8 linear.keep_last_fraction=0.1 $probe"
fp8_wgrad="fp8-wgrad16: $int8_attention linear.precision=fp8 linear.recipe=rowwise_bf16_wgrad"
int8_alone="int8-alone: linear.precision=int8 $probe"
int8="int8: $int8_attention linear.precision=int8"
int8_wgrad="int8-wgrad16: $int8_attention linear.precision=int8 linear.recipe=rowwise_bf16_wgrad"
no_qk_norm=(attention.qk_norm=none 'guidance.override=[qk_norm_for_large_steps]')

band=${BAND:-$((${SEEDS:-3} < 2 ? ${SEEDS:-3} : 2))}

# row NAME TOKENS_PER_STEP STEPS SEQUENCES_PER_MICRO_BATCH ARGUMENTS_OF_COMPARE...
row() {
  local name=$1 tokens=$2 steps=$3 micro=$4 total=$(($2 * $3))
  shift 4
  sagetrain compare results/rounding-band/43m.yaml --baseline sdpa --seeds "${SEEDS:-3}" --per-gpu "${RUNS:-3}" \
    ${TIME_LIMIT:+--time-limit "$TIME_LIMIT"} -o "results/tokens-per-step/$name" \
    training.seed="${SEED:-1}" training.total_tokens=$total tokens_per_step.tokens="$tokens" data.micro_batch_size="$micro" \
    lr_schedule.warmup_tokens=$((total / 10)) lr_schedule.decay_tokens=$((total / 5)) \
    evaluation.every_tokens=$((total / 4)) checkpoint.every_tokens=$((total / 4)) "$@"
}

# parted NAME TOKENS_PER_STEP STEPS ARGUMENTS_OF_COMPARE...: runs of a seed are one, in 16 bits, for 288 steps of 131,072
# tokens, then take STEPS of another size, the last three fifths of them at a falling learning rate.
parted() { parted_from results/rounding-band/43m.yaml 37748736 8388608 "$@"; }

# parted_from CONFIG TRUNK_TOKENS WARMUP_TOKENS NAME TOKENS_PER_STEP STEPS ARGUMENTS_OF_COMPARE...
parted_from() {
  local config=$1 trunk=$2 warmup=$3 name=$4 tokens=$5 rest=$(($5 * $6))
  shift 6
  sagetrain compare "$config" --baseline sdpa --seeds "${SEEDS:-3}" --band "$band" --per-gpu "${RUNS:-3}" \
    ${TIME_LIMIT:+--time-limit "$TIME_LIMIT"} -o "results/tokens-per-step/$name" --branch "$trunk" \
    training.seed="${SEED:-1}" training.total_tokens=$((trunk + rest)) lr_schedule.warmup_tokens="$warmup" \
    "tokens_per_step={schedule: stages, stages: [{from_tokens: 0, tokens: 131072}, {from_tokens: $trunk, tokens: $tokens}]}" \
    lr_schedule.decay_tokens=$((rest * 3 / 5)) evaluation.every_tokens=$((trunk / 2)) \
    checkpoint.every_tokens=$((trunk / 2)) "$@"
}

# parted_325m NAME ARGUMENTS_OF_COMPARE...: the papers' model, 200 steps of 131,072 tokens in 16 bits, then 40 of 262,144.
parted_325m() {
  local name=$1
  shift
  parted_from configs/325m.yaml 26214400 5242880 "$name" 262144 40 attention.backend=sdpa linear.precision=bf16 optimizer.lr=6e-4 \
    lr_schedule.shape=wsd lr_schedule.min_lr=6e-5 'data.train=[{path: data/docs4k/train}]' \
    'data.valid=[{path: data/docs4k/valid}]' evaluation.num_sequences=64 "$@"
}

# decided SEED: the steps that paper-aware of row aware took, as a schedule that decides nothing. A change begins with the step
# after the next one (sagetrain/stability/noise_aware.py).
decided() {
  python3 - "results/tokens-per-step/aware/runs/paper-aware/seed-$1/events.jsonl" <<'END'
import json, sys
stages = [(0, 131072)]
for event in map(json.loads, open(sys.argv[1])):
    if event["kind"] == "tokens_per_step" and event["to"] != event["from"]:
        stages.append((event["tokens"] + event["from"], event["to"]))
stages = ", ".join(f"{{from_tokens: {begin}, tokens: {size}}}" for begin, size in stages)
print(f"tokens_per_step={{schedule: stages, stages: [{stages}]}}")
END
}

for name in "$@"; do
  case $name in
    parted-16k) parted "$name" 16384 2304 data.micro_batch_size=8 --variant "$paper" --variant "$scores" --variant "$int8" \
      --variant "$paper_end" --variant "$capped" --variant "$sdpa_capped" ;;
    past-16k) parted "$name" 16384 2304 data.micro_batch_size=8 --variant "$fine" --variant "$paper_edges" \
      --variant "$paper_ladder" ;;
    past-64k) parted "$name" 65536 576 --variant "$fine" ;;
    aware) parted "$name" 131072 288 data.micro_batch_size=8 --allow tokens_per_step --variant "$paper_aware" ;;
    decided) # one seed: 16 bits and paper in the steps that it decided in row aware
      steps=$(decided "${SEED:-1}")
      SEEDS=1 band=$((band > 0)) parted "$name-${SEED:-1}" 131072 288 data.micro_batch_size=8 "$steps" --variant "$paper" ;;
    parted-64k) parted "$name" 65536 576 --variant "$paper" --variant "$scores" --variant "$int8" ;;
    B-256k) row "$name" 262144 500 32 --variant "$paper" --variant "$fp8" ;;
    int8-131k) row "$name" 131072 650 32 --variant "$int8" ;;
    late-131k) row "$name" 131072 650 32 checkpoint.every_tokens=8519680 --branch 8519680 --band "$band" --variant "$int8" ;;
    early-256k) row "$name" 262144 125 32 lr_schedule.shape=constant lr_schedule.min_lr=0 lr_schedule.warmup_tokens=13107200 \
      lr_schedule.decay_tokens=null --variant "$scores" --variant "$fp8" --variant "$fp8_alone" --variant "$fp8_wgrad" \
      --variant "$int8" --variant "$int8_wgrad" ;;
    parted-512k) parted "$name" 524288 72 --variant "$paper" --variant "$no_smoothing" --variant "$q_smoothing" \
      --variant "$fp8_alone" --variant "$int8_alone" ;;
    parted-linear) parted "$name" 524288 72 --variant "$fp8_alone" --variant "$fp8_end" --variant "$int8_alone" ;;
    parted-325m) parted_325m "$name" --variant "$paper" --variant "$scores" --variant "$fp8_alone" --variant "$int8_alone" ;;
    both-325m) parted_325m "$name" --variant "$fp8" --variant "$int8" ;;
    fine-325m) parted_325m "$name" --variant "$fine" ;;
    parted-1m) parted "$name" 1048576 36 --variant "$paper" ;;
    parted-2m) parted "$name" 2097152 18 --variant "$paper" --variant "$int8" ;;
    past-2m) parted "$name" 2097152 18 --variant "$paper" --variant "$scores" --variant "$fine" ;;
    smoothing-512k) parted "$name" 524288 72 --variant "$paper" --variant "$no_smoothing" --variant "$q_smoothing" ;;
    parted-c-2m) parted "$name" 2097152 18 "${no_qk_norm[@]}" --variant "$paper" ;;
    parted-c-512k) parted "$name" 524288 72 "${no_qk_norm[@]}" --variant "$paper" ;;
    C-512k) row "$name" 524288 108 32 "${no_qk_norm[@]}" lr_schedule.warmup_tokens=18874368 --variant "$paper" ;;
    *)
      echo "$name: not a row; rows: B-256k int8-131k late-131k early-256k parted-16k past-16k past-64k aware decided" \
        "parted-64k parted-512k parted-linear parted-325m both-325m fine-325m parted-1m parted-2m past-2m smoothing-512k" \
        "parted-c-2m parted-c-512k C-512k" >&2
      exit 2
      ;;
  esac
done
