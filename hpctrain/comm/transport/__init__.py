"""Transports: carriers of bytes between ranks. The algorithms that use them are in ``comm.algorithms``."""
