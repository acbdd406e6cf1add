"""BIRD-shaped data made from a seed: databases, questions, demonstrations."""
