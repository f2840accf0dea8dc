#!/usr/bin/env bash
# Every small recipe in FP32, BF16 and FP16 (scale 1, 8, 128, dynamic), seeds 0 to 2, and the tables of all of it.
# Finished runs are kept and interrupted ones resume, so it can be stopped and started at will.
#   SEEDS=0 RECIPES="resnet language" bash scripts/reproduce_all.sh
set -u
cd "$(dirname "$0")/.."
seeds=${SEEDS:-0,1,2}
recipes=${RECIPES:-$(cd recipes && ls -- *.yaml | grep -v '_paper\.yaml$' | sed 's/\.yaml$//')}
mptrain=.venv/bin/mptrain
status=0
for recipe in $recipes; do
  "$mptrain" -m "+recipe=$recipe" precision=fp32,bf16 "seed=$seeds" || status=1
  "$mptrain" -m "+recipe=$recipe" precision=fp16 scale=1,8,128,dynamic "seed=$seeds" || status=1
done
mkdir -p results/tables
"$mptrain" compare results/runs --csv results/tables/all.csv --md results/tables/all.md --html results/tables/all.html || status=1
exit "$status"
