"""Tensor parallelism: candidates, and time of a step."""
