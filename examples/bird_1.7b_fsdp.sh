#!/usr/bin/env bash
# The values of bird_1.7b.sh on SkyRL's own FSDP workers, to compare speed, memory and rewards with.
#
#   bash examples/bird_1.7b_fsdp.sh [SkyRL overrides ...]
#   SMOKE=1 bash examples/bird_1.7b_fsdp.sh
#   bash examples/bird_1.7b_fsdp.sh trainer.arctic_rl.dry_run=true  check it without GPUs, model and data
#
# Change what you change in bird_1.7b.sh, in both. FSDP needs GPUs: SMOKE and dry_run put the same entry module and
# values on this package's server. SkyRL's own parser knows no environment.skyrl_gym.bird.* and no trainer.arctic_rl.*.
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

model="${MODEL:-Qwen/Qwen3-1.7B}"
data="${DATA:-$HOME/data/bird}"
nodes=1
gpus="${GPUS:-8}"
engines="$gpus"
source examples/bird_values.sh

exec "$PYTHON" -m "${launcher[@]}" examples.bird_fsdp "${run_values[@]}" "${values[@]}" \
    trainer.strategy=fsdp \
    "${smoke[@]}" "$@"
