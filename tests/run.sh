#!/usr/bin/env bash
# Install the project and run its tests: the fast ones, then those that start Ray, vLLM or DeepSpeed.
# Arguments go to pytest in place of that, e.g. `bash tests/run.sh tests/arctic_rl/test_layout.py`.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../scripts/install.sh"
install_project --extra arctic-platform
cd "$project_root"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
echo "== lint"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
echo "== unit tests"
# Three files at a time, each in one process: they wait for processes of their own, and import for seconds.
OMP_NUM_THREADS=1 "$PYTHON" -m pytest -q -m "not slow" -n 3 --dist loadfile
echo "== tests with real Ray, vLLM and DeepSpeed processes"
"$PYTHON" -m pytest -q -m slow --durations=15
