"""Say before a run begins what it will need: memory and time, on a machine without MPI and without a GPU."""
