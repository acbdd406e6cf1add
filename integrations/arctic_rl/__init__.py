"""A DeepSpeed and vLLM training-and-sampling server as a SkyRL backend."""
