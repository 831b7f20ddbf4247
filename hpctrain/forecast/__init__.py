"""Forecasts of the memory and time of a run before it starts, on a machine without MPI and without a GPU."""
