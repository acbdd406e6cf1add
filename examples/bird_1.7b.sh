#!/usr/bin/env bash
# GRPO on BIRD: Qwen3-1.7B on the 8 GPUs of one node.
#
#   python -m envs.bird.preprocess --bird_dir D --output_dir ~/data/bird     once, from BIRD's own download
#   bash examples/bird_1.7b.sh [SkyRL overrides ...]
#   SMOKE=1 bash examples/bird_1.7b.sh
#   bash examples/bird_1.7b.sh trainer.arctic_rl.dry_run=true       check it without GPUs, model and data
#
# Change: GPUS; MODEL; DATA; the values in bird_values.sh; how answers are scored: environment.skyrl_gym.bird.* of
# envs/bird/README.md. Out of GPU memory: both micro-batch sizes, which do not change the result.
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

model="${MODEL:-Qwen/Qwen3-1.7B}"
data="${DATA:-$HOME/data/bird}"
nodes=1
gpus="${GPUS:-8}"
engines="$gpus"
source examples/bird_values.sh

exec "$PYTHON" -m skyrl.train.entrypoints.main_base "${run_values[@]}" "${values[@]}" \
    trainer.arctic_rl.zero_stage=2 \
    "${smoke[@]}" "$@" \
    trainer.override_entrypoint=integrations.arctic_rl.entrypoint
