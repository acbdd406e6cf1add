"""``python -m integrations.arctic_rl.server``."""

from .http.serve import main

main()
