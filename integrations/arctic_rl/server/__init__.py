"""The built-in server: training workers, sampling workers and the weight sync between them."""
