"""Find out where this process runs and who started it, from the environment alone: no MPI, no torch."""
