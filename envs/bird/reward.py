"""`compute_score`, verl's custom reward function: `custom_reward_function.path` may name this file or this module."""

if __package__:
    from .standalone import compute_score
else:
    # loaded by its path, as verl does, so that there is no package for relative imports to start from
    from skyrl_arctic_rl.envs.bird.standalone import compute_score

__all__ = ["compute_score"]
