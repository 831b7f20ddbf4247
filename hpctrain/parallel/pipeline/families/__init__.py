"""Hold the schedules, a family a file: pure functions from ranks, microbatches, chunks a rank to lists of actions."""
