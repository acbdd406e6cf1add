"""``python -m integrations.arctic_rl.doctor [recipe overrides]``: print what was found; status 1 = not ready."""

import sys

from .report import examine

if __name__ == "__main__":
    lines, problems = examine(sys.argv[1:])
    print("\n".join(lines))
    print("\nready" if not problems else "\nnot ready:\n" + "\n".join(f"- {problem}" for problem in problems))
    sys.exit(1 if problems else 0)
