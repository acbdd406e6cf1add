#!/usr/bin/env bash
# Train a tiny text-to-SQL model with GRPO on this machine: SkyRL's trainer, DeepSpeed, vLLM and SQLite, no GPU needed.
#
#   bash examples/quickstart.sh [SkyRL overrides ...]
#
# Data and the starting model are made once and kept in $ARCTIC_RL_CACHE (default: ~/.cache/skyrl-arctic-rl/quickstart);
# each run gets a folder of its own below $ARCTIC_RL_RUNS (default: ./runs). The last line printed is the path of the
# run's summary.json.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../scripts/install.sh"
install_project

cache="${ARCTIC_RL_CACHE:-$HOME/.cache/skyrl-arctic-rl/quickstart}"
run_dir="${ARCTIC_RL_RUNS:-$PWD/runs}/quickstart-$(date +%Y%m%d-%H%M%S)-$$"
mkdir -p "$cache" "$run_dir"
echo "== data and starting model: $cache"
echo "== this run: $run_dir"
cd "$project_root"
exec "$PYTHON" -m examples.quickstart --cache_dir "$cache" --run_dir "$run_dir" -- "$@"
