"""The server over HTTP: the calls of ``RemoteBackend`` as requests, their bodies in the format of ``wire.body``."""
