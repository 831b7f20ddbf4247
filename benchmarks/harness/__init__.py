"""Common parts of the benchmarks: run, statistics, targets, tables and files, pictures."""
