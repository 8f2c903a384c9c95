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

# grid OPTIMIZER WARMUP EMBEDDING RATES...: adds to `variants`. A warm-up is in steps, an embedding of 0 has the rate of the others.
grid() {
  local name=$1 warmup=$2 embedding=$3 lr
  shift 3
  for lr in "$@"; do
    variants+=(--variant "$name-$lr-w$warmup-e$embedding: $(keys "$name" "$lr" "$warmup" "$embedding")")
  done
}

# keys OPTIMIZER RATE WARMUP EMBEDDING: what `grid` sets.
keys() {
  local embedding=$4
  [ "$embedding" != 0 ] || embedding=null
  echo "optimizer.name=$1 optimizer.lr=$2 lr_schedule.warmup_tokens=$(($3 * step)) optimizer.lr_of.embedding=$embedding"
}

# Both optimizers tuned in rate, warm-up and the embedding's own rate, one seed.
tuned() {
  local variants=()
  grid adamw 100 0 1e-3 2e-3 3e-3
  grid adamw 200 0 2e-3 4e-3
  grid adamw 100 4e-3 5e-4 1e-3
  grid adamw 100 8e-3 1e-3 2e-3
  grid adamw 200 8e-3 2e-3 4e-3
  grid muon 32 0 4e-3
  grid muon 100 0 2e-3 4e-3 8e-3
  grid muon 200 0 4e-3 8e-3
  grid muon 100 1e-3 4e-3 8e-3
  grid muon 100 8e-3 4e-3 8e-3
  grid muon 100 1.6e-2 4e-3
  row tuned --baseline adamw-1e-3-w32-e0 --seeds 1 optimizer.lr=1e-3 "${variants[@]}"
}

# The best of `tuned` lay at edges: longer warm-ups and larger rates of the embedding.
further() {
  local variants=()
  grid adamw 200 1.6e-2 1e-3 2e-3
  grid adamw 200 3.2e-2 1e-3 2e-3
  grid adamw 300 8e-3 2e-3 4e-3
  grid adamw 300 1.6e-2 2e-3 4e-3
  grid muon 200 1.6e-2 4e-3 8e-3
  grid muon 200 8e-3 1.6e-2
  grid muon 300 0 8e-3 1.6e-2
  grid muon 300 1.6e-2 8e-3
  grid muon 300 8e-3 1.6e-2
  # shellcheck disable=SC2046
  row further --baseline adamw-2e-3-w200-e8e-3 --seeds 1 $(keys adamw 2e-3 200 8e-3) "${variants[@]}"
}

# The best of `tuned` and `further` by held-out loss, with three other seeds.
best() {
  local adamw muon
  adamw=$(best_of adamw) muon=$(best_of muon)
  # shellcheck disable=SC2086
  row best --baseline adamw --seeds "${SEEDS:-3}" training.seed=1 $adamw --variant "muon: $muon" \
    ${INT8:+--variant} ${INT8:+"adamw-int8: $int8"} ${INT8:+--variant} ${INT8:+"muon-int8: $muon $int8"}
}

# best_of OPTIMIZER: the keys of its best run, whose name says them.
best_of() {
  local name
  name=$(python3 - "$1" <<'PYTHON'
import json, sys

runs = [json.loads(line) for row in ("tuned", "further") for line in open(f"results/muon-loss/{row}/losses.jsonl")]
ended = {run["variant"]: run["valid_end"] for run in runs if run["valid_end"] and run["variant"].startswith(sys.argv[1])}
print(min(ended, key=ended.get))
PYTHON
)
  [[ $name =~ ^(.*)-(.*e-[0-9])-w(.*)-e(.*)$ ]]
  keys "${BASH_REMATCH[@]:1:4}"
}

for name in "$@"; do
  "$name"
done
