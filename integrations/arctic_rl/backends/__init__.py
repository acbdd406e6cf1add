"""Remote backends: the contract, the registry of names, and one file a backend."""
