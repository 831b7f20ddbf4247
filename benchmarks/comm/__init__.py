"""Communication benchmarks: candidates, operations, timing, and figures."""
