"""``python -m integrations.arctic_rl.doctor``: what stands between this machine and a run."""
