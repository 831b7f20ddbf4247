"""Pipeline schedules: candidates, timing of steps, and comparison with the ideal time."""
