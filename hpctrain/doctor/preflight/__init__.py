"""Measurements of a job's nodes by all of its ranks, and detection of slow nodes."""
