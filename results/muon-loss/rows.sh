#!/usr/bin/env bash
# Muon, and small states of the optimizer, beside AdamW at 43M on the GPUs that CUDA_VISIBLE_DEVICES shows:
#
#   sagetrain prepare TEXT -o data/docs8k/train --vocab-size 8192 --valid-fraction 0.02
#   results/muon-loss/rows.sh rates                                  # the learning rates to give to the others
#   ADAMW=5e-4 MUON=4e-3 results/muon-loss/rows.sh seeds halves states
#
#   STEPS=200 results/muon-loss/rows.sh large                        # 325M; SEEDS=1 for the rates alone
#
# A row that was stopped goes on where it was. RUNS is the number of runs at a time on each GPU (3), STEPS the number of
# steps of 65,536 tokens (400), SEED the first seed (1) and SEEDS their number (3), TIME_LIMIT the seconds after which a
# row saves its runs and stops. Four H100s are expected to take 550 s for all rows of 43M.
set -euo pipefail
cd "$(dirname "$0")/../.."

step=65536
steps=${STEPS:-400}
total=$((step * steps))
half=$((total / 2 / step * step))
adamw="optimizer.lr=${ADAMW:-5e-4}"
muon="optimizer.name=muon optimizer.lr=${MUON:-4e-3}"
int8="linear.precision=int8 attention.backend=sage attention.recipe=scores"

# row NAME ARGUMENTS_OF_COMPARE...: every run is on FSDP2, which masters in 16 bits need.
row() {
  local name=$1
  shift
  sagetrain compare "${MODEL:-results/rounding-band/43m.yaml}" --per-gpu "${RUNS:-3}" ${TIME_LIMIT:+--time-limit "$TIME_LIMIT"} \
    -o "results/muon-loss/$name" --margin 0.005 'data.train=[{path: data/docs8k/train}]' 'data.valid=[{path: data/docs8k/valid}]' \
    linear.precision=bf16 attention.backend=sdpa parallel.engine=fsdp training.total_tokens=$total \
    "tokens_per_step={schedule: constant, tokens: $step}" \
    "lr_schedule={shape: cosine, min_lr: 0.0, warmup_tokens: $((total / 12 / step * step))}" \
    "checkpoint={every_tokens: $half, keep_last: 1}" "evaluation={every_tokens: $total, num_sequences: 448}" "$@"
}

# One seed decides the learning rate of each optimizer.
rates() {
  local variants=() name lr
  for lr in 2.5e-4 3.5e-4 1e-3 2e-3 4e-3; do
    variants+=(--variant "adamw-$lr: optimizer.lr=$lr")
  done
  for lr in 5e-4 1e-3 2e-3 4e-3 8e-3 1.6e-2; do
    variants+=(--variant "muon-$lr: optimizer.name=muon optimizer.lr=$lr")
  done
  row rates --baseline adamw-5e-4 --seeds 1 optimizer.lr=5e-4 "${variants[@]}"
}

# Three other seeds, from the first token on.
seeds() {
  row seeds --baseline adamw --seeds "${SEEDS:-3}" training.seed="${SEED:-1}" "$adamw" --variant "muon: $muon" --variant "adamw-int8: $int8" \
    --variant "muon-int8: $muon $int8"
}

# What INT8 costs behind a common first half in 16 bits, where chance is smaller.
halves() {
  row halves-adamw --baseline adamw --branch $half --seeds "${SEEDS:-3}" training.seed="${SEED:-1}" "$adamw" --variant "adamw-int8: $int8"
  # The keys of Muon are those of all runs here.
  # shellcheck disable=SC2086
  row halves-muon --baseline muon --branch $half --seeds "${SEEDS:-3}" training.seed="${SEED:-1}" $muon --variant "muon-int8: $int8"
}

states() {
  row states --baseline fp32 --seeds "${SEEDS:-3}" training.seed="${SEED:-1}" "$adamw" --variant 'moments-bf16: optimizer.moments=bf16' \
    --variant 'moments-int8: optimizer.moments=int8' --variant 'master-chance: optimizer.master=bf16_chance' \
    --variant 'master-kahan: optimizer.master=bf16_kahan'
}

# A larger model: the rates, and INT8 under Muon.
large() {
  local variants=() lr
  for lr in 6e-5 2.5e-4 5e-4; do
    variants+=(--variant "adamw-$lr: optimizer.lr=$lr")
  done
  for lr in 2e-3 4e-3 8e-3; do
    variants+=(--variant "muon-$lr: optimizer.name=muon optimizer.lr=$lr")
  done
  MODEL=configs/325m.yaml row large --baseline adamw-1.25e-4 --seeds "${SEEDS:-3}" training.seed=1 optimizer.lr=1.25e-4 \
    "${variants[@]}" --variant "muon-int8: $muon $int8"
}

for name in "$@"; do
  "$name"
done
