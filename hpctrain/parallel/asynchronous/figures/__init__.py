"""Metrics of asynchronous training: staleness of updates, and time spent on exchanges."""
