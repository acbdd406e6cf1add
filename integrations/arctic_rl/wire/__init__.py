"""Batches on their way to a server: rows without padding, and the body of a request."""
