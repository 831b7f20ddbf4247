"""Collectives in node-shared memory, and two-level collectives over several nodes."""
