"""The training pipeline: forward, named post-processors, loss and backward over one batch of rows."""
