"""Pipeline parallelism: model partition, schedules, communication between stages, and the executor."""
