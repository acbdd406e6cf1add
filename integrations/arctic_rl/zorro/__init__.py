"""Prompt sharing: the common prefix of a group of rows goes through the model once for all of them."""

WHERE_POSSIBLE = "where_possible"
"""Value of ``meta["zorro_train_enable"]`` that shares prompts only if the model can."""
