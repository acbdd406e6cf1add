"""Gym environments; importing this package registers them with skyrl-gym."""
