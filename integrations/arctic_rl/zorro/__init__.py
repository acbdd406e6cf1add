"""Prompt sharing: the common prefix of a group of rows goes through the model once for all of them."""
