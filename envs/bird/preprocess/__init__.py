"""From raw BIRD, Spider and GretelAI folders to verl-format parquet: ``python -m envs.bird.preprocess --help``."""
