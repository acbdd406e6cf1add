#!/usr/bin/env bash
# Sourced by the recipes: where things are, and the switch SMOKE. A recipe's own arguments are looked at, not changed.
#
#   PYTHON     python of the environment that runs SkyRL and this package (default: this project's .venv)
#   RUNS       folder below which a run keeps logs, checkpoints and exports (default: ./runs); all nodes must share it
#   SMOKE=1    three steps of the same recipe on this machine's CPUs, with the quickstart's tiny model and data: model,
#              data and sizes are replaced, everything else stays the recipe's
#
# Sets: PYTHON; run_values (where a run keeps what, the same for all recipes); smoke (overrides that shrink the recipe;
# empty without SMOKE); and launcher (empty, or the module that puts a recipe's own entry module on this project's
# server). A run that is started again goes on from its last checkpoint. Works from the project's folder, so write
# absolute paths in overrides and DATA.
set -euo pipefail

project_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
run_dir="$(realpath -m "${RUNS:-runs}")/$(basename "$0" .sh)"
cache="$(realpath -m "${ARCTIC_RL_CACHE:-$HOME/.cache/skyrl-arctic-rl/quickstart}")"
cd "$project_root"

smoke=() launcher=() makes_data=1
if [ "${SMOKE:-0}" = 1 ]; then
    if [ -z "${PYTHON:-}" ]; then
        source scripts/install.sh
        install_project
    fi
    export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
    "$PYTHON" -m examples.smoke --cache_dir "$cache" --env_class "${smoke_env:-bird}"
    MODEL="$cache/model-0" DATA="$cache/data-0${smoke_env:+-$smoke_env}"
    smoke_text="$("$PYTHON" -m examples.smoke)"
    mapfile -t smoke <<<"$smoke_text"
    run_dir="$run_dir-smoke-$(date +%Y%m%d-%H%M%S)-$$"
    launcher=(integrations.arctic_rl.launch) makes_data=0
fi
PYTHON="${PYTHON:-$project_root/.venv/bin/python}"

run_values=(
    trainer.run_name="$(basename "$run_dir")"
    trainer.ckpt_path="$run_dir/checkpoints"
    trainer.max_ckpts_to_keep=2
    trainer.resume_mode=latest
    trainer.export_path="$run_dir/exports"
    trainer.log_path="$run_dir/logs"
    trainer.logger=console
)

for argument in "$@"; do
    case "$argument" in
        trainer.arctic_rl.dry_run=true) launcher=(integrations.arctic_rl.launch) makes_data=0 ;;
    esac
done

# Runs a module that makes a recipe's data, unless this run needs none.
prepare() {
    [ "$makes_data" = 0 ] || "$PYTHON" -m "$@"
}
