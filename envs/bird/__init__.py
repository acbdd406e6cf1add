"""Text-to-SQL on BIRD-shaped data: prompts, confined execution, exact comparison, rewards and the environment."""
