"""Checks on a login node, or in one process of a job; this process itself loads neither torch nor MPI."""
