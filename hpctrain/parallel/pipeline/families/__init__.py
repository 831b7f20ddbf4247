"""Pipeline schedules, one per file: pure functions of ranks, microbatches and chunks per rank that return actions."""
