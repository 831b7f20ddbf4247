"""Collective operations: the communicator, one module per algorithm, and the selection among algorithms."""
