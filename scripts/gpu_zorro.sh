#!/usr/bin/env bash
# Measure prompt sharing on one GPU: attention back ends against float32, then Qwen3 shapes from 0.6B to 8B with random
# weights. Prints JSON lines; ends after 8 minutes at the latest. Arguments go to `python -m benchmarks.zorro_gpu`.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python="${PYTHON:-.venv/bin/python}"
exec timeout 480 "$python" -m benchmarks.zorro_gpu "$@"
