#!/usr/bin/env bash
# GRPO on BIRD: Qwen3-8B on 2 nodes of 8 GPUs.
#
#   ray start --head                               on the first node, then
#   ray start --address FIRST_NODE:6379            on the other; then on the first one
#   bash examples/bird_8b.sh [SkyRL overrides ...]
#   SMOKE=1 bash examples/bird_8b.sh
#   bash examples/bird_8b.sh trainer.arctic_rl.dry_run=true         check it without GPUs, model and data
#
# DATA, RUNS and the model's folder must be on storage that all nodes share (data: see bird_1.7b.sh).
# Change: NODES and GPUS (of a node); MODEL; DATA; the values in bird_values.sh; zero_stage=2 where memory allows it.
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

model="${MODEL:-Qwen/Qwen3-8B}"
data="${DATA:-$HOME/data/bird}"
nodes="${NODES:-2}"
gpus="${GPUS:-8}"
engines=$((nodes * gpus / 2))
source examples/bird_values.sh

exec "$PYTHON" -m skyrl.train.entrypoints.main_base "${run_values[@]}" "${values[@]}" \
    generator.inference_engine.tensor_parallel_size=2 \
    trainer.arctic_rl.zero_stage=3 \
    trainer.arctic_rl.startup_timeout_s=1800 \
    "${smoke[@]}" "$@" \
    trainer.override_entrypoint=integrations.arctic_rl.entrypoint
