"""Snowflake's public server, the package ``arctic-platform`` (0.1.4): its payloads, and what it would ignore."""
