"""Measure the nodes of a job with all of its ranks, and name those that are slow."""
