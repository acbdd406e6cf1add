#!/usr/bin/env bash
# Everything that only a GPU can show, on one GPU: attention, prompt sharing, Liger, log-probs at the full vocabulary,
# ZeRO with offloading, CUDA IPC. Prints JSON lines; ends after 8 minutes at the latest. Exit status 0 = all figures are
# within their bounds, 1 = one is not, 2 = something was skipped. Arguments go to `python -m benchmarks.gpu_check`.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python="${PYTHON:-.venv/bin/python}"
exec timeout 480 "$python" -m benchmarks.gpu_check "$@"
