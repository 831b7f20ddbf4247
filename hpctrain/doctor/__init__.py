"""Examine where a job will run: what a login node shows, and what the ranks of an allocation measure."""
