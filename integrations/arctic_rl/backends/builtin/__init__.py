"""The built-in server: DeepSpeed training workers and vLLM sampling workers as Ray actors.

``backend`` is the contract's methods; ``workers`` starts and ends the actors and knows where they are; ``calls`` calls
them, and notices deaths; ``training``, ``sampling``, ``weights`` and ``checkpoints`` are what they are called for;
``restart`` brings an engine up again.
"""

from .backend import BuiltinBackend
from .cluster import describe_cluster

__all__ = ["BuiltinBackend", "describe_cluster"]
