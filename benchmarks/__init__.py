"""Measurements, each a module that prints JSON lines ``{"name", "ratio", "bound", "ok", ...}``."""
