"""Environment of this process: launcher, scheduler, nodes and CPUs; without MPI and torch."""
