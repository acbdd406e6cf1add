"""``python -m integrations.arctic_rl.support``: print the support table that the README holds."""

from .markdown import markdown

print(markdown())
