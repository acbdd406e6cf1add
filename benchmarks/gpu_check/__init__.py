"""What only a GPU can show: ``bash scripts/gpu_check.sh``, or ``python -m benchmarks.gpu_check``."""
