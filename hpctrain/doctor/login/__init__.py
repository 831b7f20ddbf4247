"""Look around on a login node, or in one process of a job; this process loads neither torch nor MPI for that."""
